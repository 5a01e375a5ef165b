#!/usr/bin/env python3
"""Greedy generation by a Llama written in numpy float64, apart from the engine.

    python3 tools/goldens/make_greedy_golden.py MODEL_DIR tests/engine/infer/golden_greedy_stories260K.json

MODEL_DIR holds config.json and model.safetensors of a Llama with default rope (stories260K in its
Hugging Face form). Every step recomputes the whole row: there is no cache that could be wrong. The
smallest gap between the best and the second logit is written along, so that a reader of a
difference sees whether a tie is to blame.
"""

import json
import pathlib
import struct
import sys

import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
NEW_TOKENS = 240


def load_safetensors(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = np.frombuffer(raw[8 + length + begin:8 + length + end], DTYPES[entry["dtype"]])
        tensors[name] = data.reshape(entry["shape"]).astype(np.float64)
    return tensors


class Llama:
    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        assert self.config["model_type"] == "llama" and not self.config.get("rope_scaling")
        self.weights = load_safetensors(folder / "model.safetensors")
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config.get("num_key_value_heads") or self.heads
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.heads

    def norm(self, x, name):
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[name]

    def linear(self, x, name):
        return x @ self.weights[name + ".weight"].T

    def rotate(self, x):  # [heads, tokens, head_dim]
        half = self.head_dim // 2
        theta = self.config.get("rope_theta", 10000.0)
        angles = np.outer(np.arange(x.shape[1]), theta ** (-np.arange(half) / half))
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def split(self, x, heads):
        return x.reshape(len(x), heads, self.head_dim).transpose(1, 0, 2)

    def attention(self, x, name):
        q = self.rotate(self.split(self.linear(x, name + "q_proj"), self.heads))
        k = self.rotate(self.split(self.linear(x, name + "k_proj"), self.kv_heads))
        v = self.split(self.linear(x, name + "v_proj"), self.kv_heads)
        k = np.repeat(k, self.heads // self.kv_heads, axis=0)
        v = np.repeat(v, self.heads // self.kv_heads, axis=0)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(self.head_dim)
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = (weights @ v).transpose(1, 0, 2).reshape(len(x), -1)
        return self.linear(mixed, name + "o_proj")

    def logits(self, ids):
        """Logits after the last of `ids`."""
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            x = x + self.attention(self.norm(x, name + "input_layernorm.weight"), name + "self_attn.")
            y = self.norm(x, name + "post_attention_layernorm.weight")
            gate = self.linear(y, name + "mlp.gate_proj")
            gated = gate / (1 + np.exp(-gate)) * self.linear(y, name + "mlp.up_proj")
            x = x + self.linear(gated, name + "mlp.down_proj")
        x = self.norm(x[-1:], "model.norm.weight")
        head = "lm_head.weight"
        if self.config["tie_word_embeddings"]:
            head = "model.embed_tokens.weight"
        return (x @ self.weights[head].T)[0]


def generate(model, prompt):
    ids, gaps = list(prompt), []
    for _ in range(NEW_TOKENS):
        logits = model.logits(ids)
        second, best = np.argsort(logits)[-2:]
        gaps.append(float(logits[best] - logits[second]))
        ids.append(int(best))
    return {"prompt_ids": list(prompt), "generated_ids": ids[len(prompt):],
            "smallest_logit_gap": min(gaps),
            "smallest_logit_gap_at": int(np.argmin(gaps))}


def main():
    folder, output = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    model = Llama(folder)
    bos = model.config["bos_token_id"]
    prompts = {
        "bos_only": [bos],
        # A few pieces of the model's own vocabulary, as an interrupted story would give.
        "prompt": [bos, 403, 407, 261, 378, 432, 383, 286, 261, 410, 276, 421],
    }
    # The model's end token is not looked at: every case has the same number of new tokens.
    result = {"model": "stories260K", "arithmetic": "numpy float64, no cache, ids in order",
              "cases": [dict(name=name, **generate(model, ids)) for name, ids in prompts.items()]}
    output.write_text("{\n" + ",\n".join(
        f'"{key}": ' + (json.dumps(value) if key != "cases" else
                        "[\n" + ",\n".join(json.dumps(case) for case in value) + "\n]")
        for key, value in result.items()) + "\n}\n")
    for case in result["cases"]:
        print(case["name"], case["smallest_logit_gap"], "at", case["smallest_logit_gap_at"])


if __name__ == "__main__":
    main()
