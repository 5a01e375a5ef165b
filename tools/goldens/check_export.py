#!/usr/bin/env python3
"""Holds the logits of an exported folder, as Tessera has them, against transformers'.

    check_export.py FOLDER [FOLDER ...] [--tessera build/cpu/tessera] [--lengths 2 17 48] [--ids 512]

For every length, rows of the same random ids that end in each id of the vocabulary (or in --ids of it, spread
evenly): the last losses of `tessera eval` are the log-probabilities behind the ids that they share, which are the
logits less their log-sum-exp. Prints the largest difference from transformers', relative to the largest magnitude;
exit code 1 above --limit. Needs torch and transformers. Weights are computed with in fp32 whatever the format of
the file, so a bf16 folder is held to the same limit.
"""
import argparse
import json
import random
import subprocess
import sys
import tempfile

import torch
import transformers


def log_probabilities(args, folder, prefix, ids):
    """Tessera's, of every one of `ids` behind `prefix`."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as rows:
        for last in ids:
            rows.write(json.dumps({"input_ids": prefix + [last]}) + "\n")
        rows.flush()
        done = subprocess.run([args.tessera, "eval", "--model", folder, "--data", rows.name,
                               "--sequence-length", str(len(prefix)), "--device", args.device, "--compute", "fp32",
                               "--token-losses", "--json"], stdout=subprocess.PIPE)
    if done.returncode != 0:
        sys.exit(f"{args.tessera} eval ended with {done.returncode}")
    losses = torch.tensor(json.loads(done.stdout)["token_losses"], dtype=torch.float64)
    if losses.numel() != len(ids) * len(prefix):
        sys.exit(f"{folder}: {losses.numel()} losses of {len(ids)} rows with {len(prefix)} targets")
    return -losses.reshape(len(ids), len(prefix))[:, -1]


def check(args, folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    wrong = {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    if wrong:
        print(f"{folder} does not load cleanly: {wrong}")
        return False
    vocab = model.config.vocab_size
    ids = sorted({i * vocab // min(args.ids, vocab) for i in range(min(args.ids, vocab))})
    row = random.Random(1).choices(range(vocab), k=max(args.lengths))
    passed = True
    for length in args.lengths:
        prefix = row[:length - 1]
        ours = log_probabilities(args, folder, prefix, ids)
        with torch.no_grad():
            logits = model.eval()(torch.tensor([prefix])).logits[0, -1].double()
        theirs = torch.log_softmax(logits, -1)[ids]
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        print(f"{folder}: {model.config.model_type}, {len(ids)} of {vocab} ids behind {len(prefix)}, "
              f"max relative error {error:.3g} (limit {args.limit:g})")
        passed = passed and error <= args.limit
    return passed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--tessera", default="build/cpu/tessera")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 17, 48])
    parser.add_argument("--ids", type=int, default=512)
    parser.add_argument("--limit", type=float, default=1e-4)
    args = parser.parse_args()
    return 0 if all([check(args, folder) for folder in args.folders]) else 1


if __name__ == "__main__":
    sys.exit(main())
