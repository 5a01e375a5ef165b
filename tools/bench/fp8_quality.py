#!/usr/bin/env python3
"""Trains configs/models/300m.json on real text in bf16 with several seeds and with each FP8 recipe, and compares the
validation losses: a recipe passes within 0.5% of bf16, or twice the spread of the seeds. One GPU, about two minutes a run
on an H200.

    python3 tools/bench/fp8_quality.py build/cuda/tessera --corpus corpus.txt --tokenizer tokenizer.json -o quality

The corpus has documents separated by <|endoftext|>, 200 MB at least (tools/bench/make_corpus.py makes one).
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys

SEPARATOR = b"<|endoftext|>"
CONFIG = """
run: {{device: cuda, dir: {folder}/{name}}}
model: {{path: configs/models/300m.json, init: random}}
train: {{sequence_length: 2048, micro_batch_size: 8, max_steps: {steps}, seed: {seed}}}
optimizer: {{learning_rate: 6e-4, weight_decay: 0.1, betas: [0.9, 0.95]}}
schedule: {{name: cosine, warmup_steps: 100, min_lr_ratio: 0.1}}
precision: {{compute: bf16, fp8: {fp8}}}
data: {{train: [{folder}/train.txt], eval: [{folder}/valid.txt], tokenizer: {tokenizer}}}
eval: {{every_steps: 100}}
checkpoint: {{contents: weights}}
"""


def split_corpus(corpus, folder):
    """Holds out 1.2 MB of documents of at most 60 kB, so that no long one decides."""
    documents = open(corpus, "rb").read().split(SEPARATOR)
    random.Random(3).shuffle(documents)
    valid, train, size = [], [], 0
    for document in documents:
        is_held_out = size < 1.2e6 and len(document) < 60_000
        size += len(document) if is_held_out else 0
        (valid if is_held_out else train).append(document)
    for name, part in (("valid", valid), ("train", train)):
        open(f"{folder}/{name}.txt", "wb").write(SEPARATOR.join(part))
    print(f"{sum(map(len, train)) / 1e6:.1f} MB to train on, {sum(map(len, valid)) / 1e6:.1f} MB to validate on")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tessera")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("-o", "--folder", required=True)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    os.makedirs(options.folder, exist_ok=True)
    split_corpus(options.corpus, options.folder)

    runs = [(f"bf16-{seed}", "none", seed) for seed in range(1, options.seeds + 1)]
    runs += [("current-1", "current", 1), ("blockwise-1", "blockwise", 1)]
    curves = {}
    for name, fp8, seed in runs:
        path = f"{options.folder}/{name}.yaml"
        with open(path, "w") as file:
            file.write(CONFIG.format(folder=options.folder, name=name, steps=options.steps, seed=seed, fp8=fp8,
                                     tokenizer=options.tokenizer))
        log = subprocess.run([options.tessera, "train", path], capture_output=True, text=True)
        if log.returncode != 0:
            sys.exit(f"{name} ended with {log.returncode}: {log.stderr[-2000:]}")
        print("\n".join(line for line in (log.stdout + log.stderr).splitlines() if line.startswith("fp8 ")), flush=True)
        rows = [json.loads(line) for line in open(f"{options.folder}/{name}/metrics.jsonl")]
        curves[name] = {row["step"]: row["loss"] for row in rows if row["kind"] == "eval"}
        rate = statistics.median(row["tokens_per_second"] for row in rows if row["kind"] == "train")
        print(f"{name}: {rate:.0f} tok/s, validation loss {list(curves[name].values())[-1]:.4f}", flush=True)

    print("| step | " + " | ".join(curves) + " |\n" + "|---" * (len(curves) + 1) + "|")
    for step in next(iter(curves.values())):
        print(f"| {step} | " + " | ".join(f"{curve[step]:.4f}" for curve in curves.values()) + " |")
    last = {name: list(curve.values())[-1] for name, curve in curves.items()}
    seeds = [loss for name, loss in last.items() if name.startswith("bf16")]
    spread = max(seeds) - min(seeds)
    allowed = max(0.005 * last["bf16-1"], 2 * spread)
    print(f"bf16: spread of {len(seeds)} seeds {spread:.4f}; allowed difference {allowed:.4f}")
    is_good = True
    for name in ("current-1", "blockwise-1"):
        difference = last[name] - last["bf16-1"]
        is_good = is_good and difference <= allowed
        print(f"{name}: {difference:+.4f} ({100 * difference / last['bf16-1']:+.2f}%) of bf16 with the same seed")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
