#!/usr/bin/env python3
"""Millions of rows: preparation in bounded memory, a kill -9 in the middle of it, and resumes whose start does
not depend on how far the run was.

    python3 tools/bench/data_scale.py --program build/cpu/tessera --folder /scratch/scale --rows 10000000

Makes FOLDER/rows.jsonl (about 180 bytes a row) if it is not there. Needs about three times its size beside it.
"""
import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

WORDS = ("the of and to in a is that for it as was with be by on not he his but at are this have from or had an "
         "they which one you were all her she there would their we him been has when who will no more if out so "
         "what up said about than into them can only other time new some could these two may first then do any "
         "like my now over such our man me even most made after also did many off before must well back through "
         "years much where your way down should because long each just state those people too mister good").split()


def make_rows(path, rows):
    """Rows of 10 to 60 words, no two alike; the same bytes whenever they are made."""
    r = random.Random(1)
    with open(path + ".part", "w", encoding="utf-8") as file:
        for i in range(0, rows, 1000):
            lines = []
            for row in range(i, min(i + 1000, rows)):
                words = " ".join(r.choices(WORDS, k=r.randint(10, 60)))
                lines.append(f'{{"text": "Row {row}: {words}."}}\n')
            file.write("".join(lines))
    os.rename(path + ".part", path)


class Child:
    """A command with its time and memory. Mapped pages of data files are the system's to take back: what counts
    is the anonymous memory, sampled; the peak of both is the kernel's own figure."""

    def __init__(self, command):
        self.start = time.perf_counter()
        self.anonymous = 0
        self.output = ""
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.readers = [threading.Thread(target=self.sample), threading.Thread(target=self.read)]
        for reader in self.readers:
            reader.start()

    def sample(self):
        while True:
            try:
                with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
                    for line in status:
                        if line.startswith("RssAnon:"):
                            self.anonymous = max(self.anonymous, int(line.split()[1]) // 1024)
            except OSError:
                return
            if self.process.returncode is not None:
                return
            time.sleep(0.02)

    def read(self):
        self.output = self.process.stdout.read()

    def wait(self):
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.seconds = time.perf_counter() - self.start
        self.peak = usage.ru_maxrss // 1024
        for reader in self.readers:
            reader.join()
        return self


def run(*command):
    child = Child(command).wait()
    if child.process.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {child.process.returncode}:\n{child.output}")
    return child


def hashes(folder):
    result = {}
    for part in ("tokens", "rows"):
        for name in sorted(os.listdir(os.path.join(folder, part))):
            with open(os.path.join(folder, part, name), "rb") as file:
                result[f"{part}/{name}"] = hashlib.file_digest(file, "sha256").hexdigest() if hasattr(
                    hashlib, "file_digest") else hashlib.sha256(file.read()).hexdigest()
    return result


def committed(folder):
    """Finished shards: their descriptions are written last."""
    path = os.path.join(folder, "tokens")
    return {name for name in os.listdir(path) if name.endswith(".json")} if os.path.isdir(path) else set()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--folder", required=True, help="outside of the repository")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--tokenizer", default="bytes", help="folder with a tokenizer.json, or `bytes`")
    options = parser.parse_args()
    os.makedirs(options.folder, exist_ok=True)
    at = lambda name: os.path.join(os.path.abspath(options.folder), name)
    rows = at(f"rows-{options.rows}.jsonl")
    if not os.path.exists(rows):
        make_rows(rows, options.rows)
    print(f"{rows}: {options.rows} rows, {os.path.getsize(rows) / 1e6:.0f} MB", flush=True)

    vocabulary = 264
    if options.tokenizer != "bytes":
        with open(os.path.join(options.tokenizer, "tokenizer.json"), encoding="utf-8") as file:
            model = json.load(file)
        vocabulary = max(list(model["model"]["vocab"].values()) + [t["id"] for t in model["added_tokens"]]) + 1
    with open(at("model.json"), "w", encoding="utf-8") as file:
        json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary,
                   "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                   "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
                   "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "float32"}, file)
    config = {"run": {"device": "cpu", "dir": at("run")}, "model": {"path": at("model.json"), "init": "random"},
              "train": {"sequence_length": 512, "global_batch_size": 8, "max_steps": 20},
              "optimizer": {"learning_rate": 1e-3}, "log": {"every_steps": 100},
              "data": {"train": [{"path": rows}], "tokenizer": options.tokenizer}}
    with open(at("run.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    tessera = lambda command, cache, *more: [options.program, command, at("run.json"), "--set",
                                             f"data.cache_dir={at(cache)}", *more]

    for name in ("whole", "killed", "run"):
        shutil.rmtree(at(name), ignore_errors=True)
    whole = run(*tessera("tokenize", "whole"))
    shards = len(committed(at("whole")))
    print(f"prepared whole: {whole.seconds:.1f} s, {os.path.getsize(rows) / 1e6 / whole.seconds:.1f} MB/s, "
          f"{shards} shards; peak {whole.anonymous} MiB of own memory ({whole.peak} MiB with mapped files)")
    print("  " + "\n  ".join(line for line in whole.output.splitlines()
                               if line.startswith(rows)), flush=True)

    # kill -9 when about half of the shards are done, and again during packing.
    child = Child(tessera("tokenize", "killed"))
    while len(committed(at("killed"))) < max(1, shards // 2):
        time.sleep(0.01)
    os.kill(child.process.pid, signal.SIGKILL)
    child.wait()
    kept = committed(at("killed"))
    marks = {name: os.stat(at(f"killed/tokens/{name}")).st_mtime_ns for name in kept}
    child = Child(tessera("tokenize", "killed"))
    while len(committed(at("killed"))) < shards or not os.listdir(at("killed/rows")):
        time.sleep(0.01)
    os.kill(child.process.pid, signal.SIGKILL)
    child.wait()
    again = run(*tessera("tokenize", "killed"))
    untouched = all(os.stat(at(f"killed/tokens/{name}")).st_mtime_ns == mark for name, mark in marks.items())
    same = hashes(at("killed")) == hashes(at("whole"))
    print(f"kill -9 with {len(kept)} of {shards} shards done, and while packing: third start {again.seconds:.1f} s, "
          f"finished shards left as they were: {untouched}, all files equal to the undisturbed ones: {same}")
    shutil.rmtree(at("killed"))

    starts = []
    for step in (1, 1000, 10_000_000):
        child = run(*tessera("inspect", "whole")[:1], "inspect", "data", *tessera("", "whole")[2:], "--rows", "0",
                    "--step", str(step))
        starts.append(f"step {step}: {child.seconds:.2f} s, {child.anonymous} MiB")
    print("data opened and one step listed: " + "; ".join(starts), flush=True)

    for steps in (20, 2000):
        shutil.rmtree(at("run"), ignore_errors=True)
        run(*tessera("train", "whole", "--set", f"train.max_steps={steps}", "--set", "schedule.name=constant"))
        child = run(*tessera("train", "whole", "--set", f"train.max_steps={steps + 1}", "--set",
                             "schedule.name=constant"))
        print(f"training resumed at step {steps} for one step: {child.seconds:.2f} s, {child.anonymous} MiB",
              flush=True)
    if not (same and untouched):
        sys.exit(1)


if __name__ == "__main__":
    main()
