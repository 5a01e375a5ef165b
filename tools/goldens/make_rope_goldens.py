#!/usr/bin/env python3
"""Rotary frequencies for every rope type, computed apart from the engine.

    python3 tools/goldens/make_rope_goldens.py tests/models/golden/rope.json

Written from the papers and the published descriptions, vectorised over pairs with numpy in float64:
Llama 3.1's stretch as a clamped blend, YaRN (Peng et al. 2023, eq. 17-24) through the wavelength of
each pair, dynamic NTK through the scaled base. With `--check`, also compares with the functions of
an installed transformers.
"""

import json
import math
import sys

import numpy as np


def base_angles(theta, dims):
    return np.exp(-np.log(theta) * np.arange(0, dims, 2, dtype=np.float64) / dims)


def llama3(theta, dims, factor, low, high, original):
    angles = base_angles(theta, dims)
    turns = original * angles / (2 * np.pi)  # how often a pair turns in the original context
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return angles * (kept + (1 - kept) / factor), 1.0


def yarn(theta, dims, factor, original, beta_fast=32, beta_slow=1, truncate=True,
         attention_factor=None, mscale=None, mscale_all_dim=None):
    angles = base_angles(theta, dims)

    def pair_with(turns):  # solves original * theta^(-2 i / dims) = 2 pi turns for i
        return dims / 2 * math.log(original / (2 * math.pi * turns), theta)

    first, last = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    if first == last:
        last += 1e-3
    stretched = np.clip((np.arange(dims // 2) - first) / (last - first), 0, 1)
    result = angles * (1 - stretched) + angles / factor * stretched

    def temperature(weight):
        return 1.0 if factor <= 1 else 1.0 + 0.1 * weight * math.log(factor)

    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = temperature(mscale) / temperature(mscale_all_dim)
        else:
            attention_factor = temperature(1.0)
    return result, attention_factor


def dynamic(theta, dims, factor, length, original):
    ratio = max(length, original) / original
    return base_angles(theta * (factor * ratio - factor + 1) ** (dims / (dims - 2)), dims), 1.0


def compute(case):
    theta = case["config"].get("rope_theta", 10000.0)
    scaling = dict(case["config"].get("rope_scaling") or {"rope_type": "default"})
    kind = scaling.pop("rope_type", None) or scaling.pop("type")
    scaling.pop("type", None)
    dims, longest = case["head_dim"], case["max_position_embeddings"]
    original = scaling.pop("original_max_position_embeddings", longest)
    if kind == "default":
        return base_angles(theta, dims), 1.0
    if kind == "linear":
        return base_angles(theta, dims) / scaling["factor"], 1.0
    if kind == "dynamic":
        return dynamic(theta, dims, scaling["factor"], case["sequence_length"], longest)
    if kind == "llama3":
        return llama3(theta, dims, scaling["factor"], scaling["low_freq_factor"],
                      scaling["high_freq_factor"], original)
    if kind == "yarn":
        factor = scaling.pop("factor", None) or longest / original
        return yarn(theta, dims, factor, original, **scaling)
    raise ValueError(kind)


def cases():
    def case(name, head_dim, longest, theta=10000.0, scaling=None, length=0):
        config = {"rope_theta": theta}
        if scaling is not None:
            config["rope_scaling"] = scaling
        return {"name": name, "head_dim": head_dim, "max_position_embeddings": longest,
                "sequence_length": length, "config": config}

    llama32 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    llama31 = dict(llama32, factor=8.0)
    yield case("default_64", 64, 4096)
    yield case("default_128_theta_1e6", 128, 32768, 1e6)
    yield case("default_head_dim_2", 2, 64)
    yield case("linear", 48, 2048, 10000.0, {"type": "linear", "factor": 4.0})
    for length in (0, 1024, 2048, 2049, 8192, 30000):
        yield case(f"dynamic_{length}", 64, 2048, 10000.0, {"type": "dynamic", "factor": 2.0}, length)
    yield case("dynamic_factor_4", 24, 32, 10000.0, {"rope_type": "dynamic", "factor": 4.0}, 77)
    yield case("llama_3_1", 128, 131072, 500000.0, llama31)
    yield case("llama_3_2_1b", 64, 131072, 500000.0, llama32)
    yield case("llama3_tiny", 24, 64, 10000.0,
               {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16})
    base = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    yield case("yarn_plain", 128, 65536, 1e6, base)
    yield case("yarn_attention_factor_1", 128, 65536, 1e6, dict(base, attention_factor=1.0))
    yield case("yarn_attention_factor_1_3", 128, 65536, 1e6, dict(base, attention_factor=1.3))
    yield case("yarn_mscales_equal", 64, 65536, 10000.0,
               {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096,
                "mscale": 1.0, "mscale_all_dim": 1.0})
    yield case("yarn_mscales_differ", 64, 163840, 10000.0,
               {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
                "mscale": 1.0, "mscale_all_dim": 0.707})
    yield case("yarn_one_mscale", 64, 65536, 10000.0, dict(base, mscale=0.707))
    yield case("yarn_explicit_wins", 64, 65536, 10000.0,
               dict(base, attention_factor=0.9, mscale=1.0, mscale_all_dim=0.5))
    yield case("yarn_betas", 64, 65536, 10000.0, dict(base, beta_fast=16.0, beta_slow=2.0))
    yield case("yarn_no_truncate", 64, 65536, 150000.0, dict(base, truncate=False))
    yield case("yarn_factor_1", 64, 8192, 10000.0, dict(base, factor=1.0))
    yield case("yarn_factor_from_lengths", 64, 32768, 10000.0,
               {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8192})
    yield case("yarn_original_from_config", 64, 4096, 10000.0, {"rope_type": "yarn", "factor": 4.0})
    yield case("yarn_step", 16, 256, 10000.0,
               {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False})
    yield case("yarn_tiny_original", 24, 64, 10000.0,
               {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16})


def check(results):
    """Largest relative difference from the installed transformers (float32 there)."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    worst = 0.0
    for case in results:
        scaling = json.loads(json.dumps(case["config"].get("rope_scaling")))
        if scaling is None:
            continue
        config = LlamaConfig(hidden_size=case["head_dim"] * 4, num_attention_heads=4,
                             head_dim=case["head_dim"], rope_theta=case["config"]["rope_theta"],
                             max_position_embeddings=case["max_position_embeddings"],
                             rope_scaling=scaling)
        kind = config.rope_parameters["rope_type"]
        got, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=case["sequence_length"] or None)
        wanted = np.array(case["inverse_frequencies"])
        error = np.max(np.abs(got.double().numpy() - wanted) / wanted)
        worst = max(worst, error, abs(factor - case["attention_scaling"]))
        print(f"{case['name']}: {error:.1e}, scaling {factor} and {case['attention_scaling']}")
    print(f"largest difference {worst:.1e}")


def main():
    results = []
    for case in cases():
        angles, scaling = compute(case)
        results.append(dict(case, inverse_frequencies=[float(x) for x in angles],
                            attention_scaling=float(scaling)))
    with open(sys.argv[1], "w") as out:
        out.write("[\n" + ",\n".join(json.dumps(r) for r in results) + "\n]\n")
    if "--check" in sys.argv:
        check(results)


if __name__ == "__main__":
    main()
