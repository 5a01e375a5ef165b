#!/usr/bin/env python3
"""How far PyTorch's own bf16 lies from float32, model by model: the yardstick of our bf16.

    pip install torch transformers        (transformers 5 or newer; a GPU is used where there is one)
    python3 tools/goldens/make_bf16_errors.py tests/models/golden/hf REFERENCE_DATA \\
        > tests/models/golden/bf16_errors.json

REFERENCE_DATA is the folder with models/stories260K/hf and golden/stories260K_reference.json; without
it that model is left out. For each model the row that the gradients of its golden belong to runs twice,
in float32 and with all weights and activations in bfloat16 (logits to float32 before the loss):

  loss      |loss(bf16) - loss(fp32)| / loss(fp32)
  gradient  |gradient(bf16) - gradient(fp32)| / |gradient(fp32)|, over all parameters
"""

import json
import pathlib
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM

import make_hf_goldens as goldens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def loss_and_gradients(folder, ids, labels, lengths, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    model = model.to(DEVICE).eval()
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    masks = goldens.masks(model.config, lengths)

    def to_model(mask):
        allowed = mask == 0
        zero = torch.zeros(mask.shape, dtype=dtype)
        return zero.masked_fill(~allowed, torch.finfo(dtype).min).to(DEVICE)

    masks = {k: to_model(m) for k, m in masks.items()} if isinstance(masks, dict) else to_model(masks)
    logits = model(input_ids=ids[None].to(DEVICE), position_ids=positions.to(DEVICE),
                   attention_mask=masks, use_cache=False).logits[0].float()
    loss = torch.nn.functional.cross_entropy(logits, labels.to(DEVICE), ignore_index=-100)
    loss.backward()
    return loss.item(), {n: p.grad.double().cpu() for n, p in model.named_parameters()}


def errors(folder, ids, labels, lengths):
    arguments = (folder, torch.tensor(ids), torch.tensor(labels), lengths)
    loss, gradients = loss_and_gradients(*arguments, torch.float32)
    low_loss, low = loss_and_gradients(*arguments, torch.bfloat16)
    difference = sum(((low[n] - g) ** 2).sum().item() for n, g in gradients.items())
    total = sum((g ** 2).sum().item() for g in gradients.values())
    return {"loss": abs(low_loss - loss) / loss, "gradient": (difference / total) ** 0.5}


def main():
    torch.backends.cuda.matmul.allow_tf32 = False
    result = {}
    for folder in sorted(path for path in pathlib.Path(sys.argv[1]).iterdir() if path.is_dir()):
        golden = json.loads((folder / "golden.json").read_text())
        row = next(r for r in golden["rows"] if r["name"] == golden["gradient_row"])
        result[folder.name] = errors(folder, row["input_ids"], row["labels"], row["document_lengths"])
    if len(sys.argv) > 2:
        root = pathlib.Path(sys.argv[2])
        reference = json.loads((root / "golden/stories260K_reference.json").read_text())
        case = next(c for c in reference["cases"] if c["name"] == "single_doc_0")
        # Its labels are shifted as in a training row: labels[t] is the target of position t.
        result["stories260K"] = errors(root / "models/stories260K/hf", case["input_ids"],
                                       case["labels"], [len(case["input_ids"])])
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__,
                      "device": DEVICE, "models": result}, indent=1))


if __name__ == "__main__":
    main()
