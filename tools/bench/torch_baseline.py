#!/usr/bin/env python3
"""The peer of `tessera train` on the same work: transformers, torch.compile and SDPA on one GPU, random weights,
bf16 parameters and Adam states, gradient clipping, AdamW. Prints tokens per second of each step and the median.

    python3 tools/bench/torch_baseline.py configs/models/1b.json --micro-batch 4 --accumulation 4 --steps 8
"""

import argparse
import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--recompute", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    config = AutoConfig.from_pretrained(options.config)
    config.use_cache = False
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    if options.recompute:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    start = time.time()
    compiled = torch.compile(model)
    shape = (options.micro_batch, options.sequence_length)
    speeds = []
    for step in range(options.steps):
        torch.cuda.synchronize()
        begin = time.time()
        for _ in range(options.accumulation):
            ids = torch.randint(0, config.vocab_size, shape, device="cuda")
            loss = compiled(input_ids=ids, labels=ids).loss / options.accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        speed = options.micro_batch * options.accumulation * options.sequence_length / (time.time() - begin)
        if step == 0:
            print(f"first step after {time.time() - start:.1f} s")
        speeds.append(speed)
        print(f"step {step + 1}: {speed:.0f} tok/s")
    peak = torch.cuda.max_memory_reserved() / 2**30
    print(f"torch {torch.__version__} {options.config}: median {statistics.median(speeds[2:]):.0f} tok/s, {peak:.1f} GiB")


if __name__ == "__main__":
    main()
