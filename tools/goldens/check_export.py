#!/usr/bin/env python3
"""Loads an exported folder with transformers and compares the loss of every token with Tessera's.

    echo '{"input_ids": [...]}' > row.jsonl                    # one row of n ids
    tessera eval --model FOLDER --data row.jsonl --labels aligned --sequence-length N \\
        --compute fp32 --token-losses --json > losses.json
    check_export.py FOLDER row.jsonl losses.json

Each loss is the log-sum-exp of all logits of a position minus one of them. Prints the largest difference,
relative to the largest loss; exit code 1 above --limit. Needs torch and transformers. Weights are computed
with in fp32 whatever the format of the file, so a bf16 folder is held to the same limit.
"""
import argparse
import json
import sys

import torch
import transformers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("row", help="JSONL of one row with input_ids")
    parser.add_argument("losses", help="what tessera eval --token-losses --json printed")
    parser.add_argument("--limit", type=float, default=1e-4)
    args = parser.parse_args()
    with open(args.row) as file:
        rows = [json.loads(line) for line in file if line.strip()]
    if len(rows) != 1:
        parser.error(f"{args.row} holds {len(rows)} rows; give one")
    ids = torch.tensor([rows[0]["input_ids"]])
    with open(args.losses) as file:
        ours = torch.tensor(json.load(file)["token_losses"], dtype=torch.float64)
    targets = ids.shape[1] - 1
    if len(ours) < targets:
        parser.error(f"{args.losses} holds {len(ours)} losses, the row has {targets} targets")

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    wrong = {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    if wrong:
        print(f"{args.folder} does not load cleanly: {wrong}")
        return 1
    with torch.no_grad():
        logits = model.eval()(ids).logits[0, :-1].double()
    theirs = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    error = ((ours[:targets] - theirs).abs().max() / theirs.abs().max()).item()
    print(f"{args.folder}: {targets} tokens, mean loss {ours[:targets].mean():.6f} and {theirs.mean():.6f}, "
          f"max relative error {error:.3g} (limit {args.limit:g})")
    return 0 if error <= args.limit else 1


if __name__ == "__main__":
    sys.exit(main())
