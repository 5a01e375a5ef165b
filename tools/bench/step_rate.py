#!/usr/bin/env python3
"""A CPU training step against OpenBLAS: model FLOPs of a step, its time, sgemm's rate in the same run, the share.

    tools/bench/step_rate.py run.yaml [--tessera build/cpu/tessera] [--steps 12] [--set key=value ...]

Trains in a folder of its own that is removed at the end. Model FLOPs: 6 a parameter of the matrix products and
token, and causal attention, as in the column mfu of metrics.jsonl. sgemm is measured before and after.
"""
import argparse
import ctypes
import ctypes.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time


def sgemm_rate(n=1536, seconds=2.0):
    """FLOP/s of C = A B for random square matrices on all cores; the median of single products."""
    name = ctypes.util.find_library("openblas") or "libopenblas.so.0"
    blas = ctypes.CDLL(name)
    blas.openblas_set_num_threads(os.cpu_count())
    random = (ctypes.c_uint32 * (n * n)).from_buffer_copy(os.urandom(4 * n * n))
    a = (ctypes.c_float * (n * n))(*(x / 2**32 - 0.5 for x in random))
    b = (ctypes.c_float * (n * n))(*reversed(a))
    c = (ctypes.c_float * (n * n))()
    rates = []
    end = time.monotonic() + seconds
    while len(rates) < 3 or time.monotonic() < end:
        start = time.perf_counter()
        blas.cblas_sgemm(101, 111, 111, n, n, n, ctypes.c_float(1), a, n, b, n, ctypes.c_float(0), c, n)
        rates.append(2 * n**3 / (time.perf_counter() - start))
    return statistics.median(rates)


def flops_per_token(model, length):
    heads = model["num_attention_heads"]
    head_dim = model.get("head_dim") or model["hidden_size"] // heads
    q = heads * head_dim
    kv = (model.get("num_key_value_heads") or heads) * head_dim
    layer = model["hidden_size"] * (2 * q + 2 * kv) + 3 * model["hidden_size"] * model["intermediate_size"]
    layers = model["num_hidden_layers"]
    return 6 * (layers * layer + model["hidden_size"] * model["vocab_size"]) + 6 * length * q * layers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--tessera", default="build/cpu/tessera")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    before = sgemm_rate()
    with tempfile.TemporaryDirectory() as folder:
        command = [args.tessera, "train", args.config, "--set", f"run.dir={folder}/run", "--set", "run.device=cpu",
                   "--set", f"train.max_steps={args.steps}", "--set", "train.epochs=null",
                   "--set", "eval.every_steps=null", "--set", "eval.max_batches=1"]
        for override in args.set:
            command += ["--set", override]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            print(done.stderr, file=sys.stderr)
            return done.returncode
        with open(f"{folder}/run/metrics.jsonl") as file:
            rows = [row for row in map(json.loads, file) if row["kind"] == "train"]
        with open(f"{folder}/run/final/config.json") as file:
            model = json.load(file)
    after = sgemm_rate()
    used = rows[2:] or rows
    step = statistics.median(row["step_seconds"] for row in used)
    tokens = statistics.median(row["tokens_per_second"] * row["step_seconds"] for row in used)
    length = sequence_length(args.config, args.set)
    flops = tokens * flops_per_token(model, length)
    sgemm = max(before, after)
    print(f"step: {flops / 1e9:.2f} GFLOP in {step * 1e3:.1f} ms = {flops / step / 1e9:.1f} GFLOP/s; "
          f"sgemm {before / 1e9:.1f} and {after / 1e9:.1f} GFLOP/s; share {flops / step / sgemm:.1%}")
    return 0


def sequence_length(config, overrides):
    """train.sequence_length as the run has it; the default of the configuration language is 2048."""
    for override in reversed(overrides):
        if override.startswith("train.sequence_length="):
            return int(override.split("=", 1)[1])
    with open(config) as file:
        found = re.search(r"sequence_length[\"']?\s*:\s*(\d+)", file.read())
    return int(found.group(1)) if found else 2048


if __name__ == "__main__":
    sys.exit(main())
