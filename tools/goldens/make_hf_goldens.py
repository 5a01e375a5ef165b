#!/usr/bin/env python3
"""Logits, losses and gradients of tiny models as transformers computes them.

    pip install torch transformers        (transformers 5 or newer)
    python3 tools/goldens/make_hf_goldens.py tests/models/golden/hf

One folder per case, each a loadable model (config.json, model.safetensors in float32, written by
transformers itself) with beside it

  golden.json         rows (ids, labels, lengths of the documents in the row, loss), the row that the
                      gradients belong to, the norm of each gradient and of all, versions
  golden.safetensors  logits.<row> [tokens, vocab] and grad.<parameter>, float32

The models run as model.double() with eager attention. transformers keeps a few places in float32
even then (RMSNorm's mean, the softmax, the rotary angles), so the values carry about 1e-7 of
relative error, not float64's. Weights are drawn with numpy, so they do not depend on the torch
version.

A packed row holds several documents: positions begin anew in each and attention does not cross. It
runs as one forward pass under an explicit mask, and is checked here against each document alone.
Labels are aligned with the ids: labels[t] is the token after ids[t], -100 where there is none.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS = 40
PACKED = [13, 1, 17, 9]
IGNORED = -100


def cases():
    """name -> (keys of config.json, names of the rows)."""
    base = dict(vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                rms_norm_eps=1e-5, rope_theta=10000.0, initializer_range=0.02, bos_token_id=1,
                eos_token_id=2, hidden_act="silu", tie_word_embeddings=False,
                attention_dropout=0.0)
    both = ["single", "packed"]
    llama = dict(base, model_type="llama")
    stretched = {"factor": 4.0, "original_max_position_embeddings": 16}
    yield "llama2_mha_untied", dict(llama, num_key_value_heads=4), both
    yield "llama3_rope_tied", dict(
        llama, vocab_size=128, head_dim=12, tie_word_embeddings=True, rope_theta=500.0,
        rope_scaling=dict(stretched, rope_type="llama3", low_freq_factor=1.0,
                          high_freq_factor=4.0)), both
    yield "llama_linear_mqa", dict(
        llama, num_key_value_heads=1, rope_scaling={"rope_type": "linear", "factor": 4.0}), both
    # Its angles depend on the largest position of the pass, so documents of a packed row are not
    # what they are alone; only the single row is kept.
    yield "llama_dynamic", dict(
        llama, max_position_embeddings=16,
        rope_scaling={"rope_type": "dynamic", "factor": 2.0}), ["single"]
    yield "llama_yarn", dict(llama, rope_scaling=dict(stretched, rope_type="yarn")), both
    yield "llama_biases", dict(llama, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-6), both
    yield "mistral_window", dict(
        base, model_type="mistral", num_attention_heads=8, num_key_value_heads=1, head_dim=8,
        vocab_size=160, sliding_window=8), both
    qwen2 = dict(base, model_type="qwen2", rms_norm_eps=1e-6)
    yield "qwen2_tied", dict(qwen2, tie_word_embeddings=True, use_sliding_window=False,
                             sliding_window=8, max_window_layers=1), both
    yield "qwen2_window_yarn", dict(
        qwen2, use_sliding_window=True, sliding_window=8, max_window_layers=1,
        rope_scaling=dict(stretched, rope_type="yarn", attention_factor=0.9)), both
    qwen3 = dict(base, model_type="qwen3", rms_norm_eps=1e-6, rope_theta=1000000.0)
    yield "qwen3_head_dim", dict(qwen3, head_dim=16), both
    yield "qwen3_tied_gqa8", dict(qwen3, num_attention_heads=8, num_key_value_heads=1, head_dim=12,
                                  hidden_size=48, tie_word_embeddings=True, vocab_size=101), both


def draw_weights(model, seed):
    """Every parameter random: a norm of ones or a bias of zeros would hide a mistake."""
    random = np.random.RandomState(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = random.standard_normal(tuple(parameter.shape))
            if name.endswith("norm.weight"):
                values = 1.0 + 0.2 * values
            elif name.endswith(".bias"):
                values = 0.3 * values
            elif "embed_tokens" in name:
                values = 0.5 * values
            else:
                values = values * 1.2 / np.sqrt(parameter.shape[-1])
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))


def build(keys, folder, seed):
    """The model as saved to `folder` and loaded again: what a user of the folder would run."""
    with tempfile.TemporaryDirectory() as scratch:
        (pathlib.Path(scratch) / "config.json").write_text(json.dumps(keys))
        config = AutoConfig.from_pretrained(scratch)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, seed)
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager",
                                                  dtype=torch.float32)
    return loaded.double().eval()


def allowed(lengths, window):
    """[tokens, tokens]: may the row's token see the column's?"""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row, column = torch.arange(len(document))[:, None], torch.arange(len(document))[None, :]
    visible = (column <= row) & (document[:, None] == document[None, :])
    return visible & (column > row - window) if window else visible


def additive(mask):
    zero = torch.zeros(mask.shape, dtype=torch.float64)
    return zero.masked_fill(~mask, torch.finfo(torch.float64).min)[None, None]


def masks(config, lengths):
    """The mask argument of this model: one tensor, or one per type of layer."""
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("qwen2", "qwen3"):
        result = {"full_attention": additive(allowed(lengths, None))}
        if "sliding_attention" in config.layer_types:
            result["sliding_attention"] = additive(allowed(lengths, window))
        return result
    return additive(allowed(lengths, window if config.model_type == "mistral" else None))


def forward(model, ids, lengths):
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    output = model(input_ids=ids[None], position_ids=positions,
                   attention_mask=masks(model.config, lengths), use_cache=False)
    return output.logits[0]


def check_documents(model, ids, lengths, logits):
    """A packed row equals its documents, each run alone with the library's own masks."""
    at = 0
    for length in lengths:
        alone = model(input_ids=ids[None, at:at + length], use_cache=False).logits[0]
        difference = (alone - logits[at:at + length]).abs().max().item()
        assert difference < 1e-5, f"document at {at}: {difference}"
        at += length


def labels_of(ids, lengths):
    labels, at = torch.full_like(ids, IGNORED), 0
    for length in lengths:
        labels[at:at + length - 1] = ids[at + 1:at + length]
        at += length
    return labels


def make(name, keys, row_names, output, seed):
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    model = build(keys, folder, seed)
    random = np.random.RandomState(1000 + seed)
    tensors, rows = {}, []
    for row_name in row_names:
        lengths = [TOKENS] if row_name == "single" else PACKED
        assert sum(lengths) == TOKENS
        ids = torch.from_numpy(random.randint(0, keys["vocab_size"], TOKENS))
        labels = labels_of(ids, lengths)
        model.zero_grad()
        logits = forward(model, ids, lengths)
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)
        loss.backward()
        with torch.no_grad():
            check_documents(model, ids, lengths, logits)
        tensors[f"logits.{row_name}"] = logits.detach().float().contiguous()
        rows.append({"name": row_name, "document_lengths": lengths, "input_ids": ids.tolist(),
                     "labels": labels.tolist(), "targets": int((labels != IGNORED).sum()),
                     "loss": loss.item()})
    # The gradients of the last row.
    norms = {}
    for parameter_name, parameter in model.named_parameters():
        norms[parameter_name] = parameter.grad.norm().item()
        tensors[f"grad.{parameter_name}"] = parameter.grad.float().contiguous()
    save_file(tensors, folder / "golden.safetensors")
    total = sum(norm ** 2 for norm in norms.values()) ** 0.5
    golden = {"transformers": transformers.__version__, "torch": torch.__version__,
              "gradient_row": row_names[-1], "gradient_norm": total, "gradient_norms": norms,
              "rows": rows}
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, losses "
          f"{[round(row['loss'], 6) for row in rows]}, gradient norm {total:.6f}")


def main():
    output = pathlib.Path(sys.argv[1])
    torch.set_num_threads(1)
    for seed, (name, keys, row_names) in enumerate(cases(), start=1):
        make(name, keys, row_names, output, seed)
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    print(f"{size / 1e6:.2f} MB in {output}")


if __name__ == "__main__":
    main()
