#!/usr/bin/env python3
"""The float64 golden of stories260K through `tessera train` and `tessera eval` under every layout and launcher.

    check_matrix.py --data ../shared/data [--tessera build/cpu/tessera] [--launch threads processes mpirun]

One training step on the four documents, for tensor 1, 2, 4, 8, with and without sequence parallelism, data 1 and 2,
ZeRO 0 and 1, recompute none, selective and full, as threads, own processes and under mpirun: loss, gradient norms of
all and of each tensor, and the weights behind the AdamW step. `tessera eval` of the same rows for each tensor and
data size. All to 1e-5 relative; a sum of weights cancels, so it is held to 1e-6 of the sum of magnitudes. The rows
of packed documents and of masked prompts are in the tests (golden_test.cpp, golden_step_test.cpp).
"""
import argparse
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time


class Checker:
    def __init__(self, args, folder):
        self.args = args
        self.folder = folder
        self.model = os.path.join(args.data, "models/stories260K/hf")
        with open(os.path.join(args.data, "golden/stories260K_reference.json")) as file:
            self.cases = {case["name"]: case for case in json.load(file)["cases"]}
        self.rows = os.path.join(folder, "rows.jsonl")
        with open(self.rows, "w") as file:
            for i in range(4):
                case = self.cases[f"single_doc_{i}"]
                file.write(json.dumps({"input_ids": case["input_ids"], "labels": case["labels"]}) + "\n")

    def run(self, command):
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def eval(self, tensor, data):
        wanted = self.cases["accumulate_4_docs_token_normalised"]
        done = self.run([self.args.tessera, "eval", "--model", self.model, "--data", self.rows, "--json", "--device", "cpu",
                         "--compute", "fp32", "--tensor", str(tensor), "--data-parallel", str(data)])
        if done.returncode != 0:
            return [f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"]
        got = json.loads(done.stdout)
        return differences([("loss", got["loss"], wanted["loss_mean"]),
                            ("tokens", got["target_tokens"], wanted["tokens"])])

    def step(self, launch, tensor, sequence, data, zero, recompute):
        update = self.cases["one_adamw_step_on_accumulate_4_docs"]
        run = os.path.join(self.folder, "run")
        shutil.rmtree(run, ignore_errors=True)
        config = {
            "run": {"dir": run, "device": "cpu"},
            "model": {"path": self.model},
            "train": {"sequence_length": 256, "micro_batch_size": 1, "global_batch_size": 4, "max_steps": 1},
            "optimizer": {"learning_rate": update["lr"], "betas": [update["beta1"], update["beta2"]],
                          "eps": update["eps"], "weight_decay": update["weight_decay_2d_only"],
                          "max_grad_norm": update["clip_grad_norm"]},
            "schedule": {"name": "constant", "warmup_steps": 0},
            "precision": {"compute": "fp32"},
            "parallel": {"tensor": tensor, "sequence_parallel": sequence, "zero": zero},
            "memory": {"recompute": recompute},
            "data": {"train": [{"path": self.rows, "labels": "shifted"}], "packing": False,
                     "cache_dir": os.path.join(self.folder, "cache")},
            "checkpoint": {"contents": "weights"},
            "log": {"per_layer": True},
        }
        path = os.path.join(self.folder, "run.json")
        with open(path, "w") as file:
            json.dump(config, file)
        command = [self.args.tessera, "train", path]
        if launch == "mpirun":
            command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(tensor * data)] + command
        else:
            command += ["--launch", launch, "--set", f"run.ranks={tensor * data}"]
        done = self.run(command)
        if done.returncode != 0:
            return [f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"]
        with open(os.path.join(run, "metrics.jsonl")) as file:
            row = json.loads(file.readline())
        wanted = self.cases["accumulate_4_docs_token_normalised"]
        pairs = [("loss", row["loss"], wanted["loss_mean"]), ("grad_norm", row["grad_norm"], wanted["grad_norm"]),
                 ("tokens", row["target_tokens"], wanted["tokens"])]
        pairs += [(name, row["grad_norms"].get(name, 0), norm) for name, norm in wanted["grad_norm_per_tensor"].items()]
        found = differences(pairs)
        for name, (total, magnitude) in sums(os.path.join(run, "final/model.safetensors")).items():
            if abs(total - update["weight_sum_after"][name]) > 1e-6 * magnitude:
                found.append(f"sum of {name} is {total}, wanted {update['weight_sum_after'][name]}")
        return found


def differences(pairs):
    return [f"{name} is {got}, wanted {wanted}" for name, got, wanted in pairs if abs(got - wanted) > 1e-5 * abs(wanted)]


def sums(path):
    """Sum and sum of magnitudes of every fp32 tensor of a file."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        payload = file.read()
    result = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        values = struct.unpack(f"<{(end - begin) // 4}f", payload[begin:end])
        result[name] = (sum(values), sum(map(abs, values)))
    return result


def layouts():
    for tensor, sequence, (data, zero) in itertools.product((1, 2, 4, 8), (False, True), ((1, 0), (2, 0), (2, 1))):
        if tensor > 1 or not sequence:
            for recompute in ("none", "selective", "full"):
                yield tensor, sequence, data, zero, recompute


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--tessera", default="build/cpu/tessera")
    parser.add_argument("--launch", nargs="+", default=["threads", "processes", "mpirun"])
    args = parser.parse_args()
    passed = failed = 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        checker = Checker(args, folder)
        work = [(("eval", tensor, data), lambda t=tensor, d=data: checker.eval(t, d))
                for tensor in (1, 2, 4, 8) for data in (1, 2)]
        work += [((launch, *layout), lambda l=launch, x=layout: checker.step(l, *x))
                 for launch in args.launch for layout in layouts()]
        for label, check in work:
            found = check()
            passed, failed = (passed, failed + 1) if found else (passed + 1, failed)
            for problem in found:
                print("FAILED", *label, problem, flush=True)
    print(f"{passed} passed, {failed} failed in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
