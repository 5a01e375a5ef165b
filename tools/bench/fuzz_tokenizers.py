#!/usr/bin/env python3
"""Compares our tokenizer with the Hugging Face library, id for id, and times both.

  python3 -m venv /tmp/venv && /tmp/venv/bin/pip install tokenizers
  /tmp/venv/bin/python tools/bench/fuzz_tokenizers.py --program build/tokenize_stream \
      --data $TESSERA_TEST_DATA [--count 100000] [--time] [--made] [--only NAME ...]

Without --made the tokenizers are those under DATA/tokenizers and DATA/models; with it, files that the
library itself writes for many configurations (trained on DATA/text). Every text is encoded with
and without special tokens; spans are compared where the library's follow the same rule.
Exit status 1 if anything differs.
"""
import argparse
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import tempfile

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


# --- texts -------------------------------------------------------------------------------------

RANGES = [
    (0x20, 0x7F), (0x20, 0x7F), (0x20, 0x7F), (0x00, 0x20), (0x80, 0x250), (0x250, 0x300),
    (0x300, 0x370), (0x370, 0x600), (0x600, 0x800), (0x900, 0xE00), (0xE00, 0x1000),
    (0x1000, 0x1200), (0x1E00, 0x2000), (0x2000, 0x2070), (0x2070, 0x2C00), (0x3000, 0x3400),
    (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0x1100, 0x1200), (0xF900, 0x10000), (0x10000, 0x11000),
    (0x1D400, 0x1D800), (0x1F300, 0x1FA00), (0x20000, 0x20100), (0, 0x110000), (0xA640, 0xABFF),
]
PIECES = [
    "'s", "'S", "'ll", "'LL", "'Re", "'\u017f", "'t", "don't", "I'VE", " ", "  ", "   ", "\t", "\n",
    "\n\n", "\r\n", " \n ", "\u00a0", "\u3000", "\u2009", "\u0085", "\u200b", "\u200d", "\ufeff",
    "\ufffd", "1", "12", "123", "1234567", "\u00bd", "\u00b2", "\uff11\uff12", "\u0661\u0662", "3.14",
    "1,000,000", "e\u0301", "\u212b", "s\u0323\u0307", "\u1100\u1161", "\ufb01", "\u0130", "\u1e9e",
    "\u01c5", "Stra\u00dfe", "camelCase", "HTTPServer", "XMLHttpRequest2", "snake_case", "\u2581",
    "\u2581\u2581", "<0x41>", "<0xE4>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|endoftext|>",
    "<|begin_of_text|>", "<|eot_id|>", "[PAD]", "<mask>", "<|user|>", "hello", "Hello", " world",
    "the", " the", "\u4f60\u597d", "\u3053\u3093", "\u30ab\u30bf", "\ud55c\uad6d\uc5b4",
    "\u0e2a\u0e27\u0e31", "\U0001f600", "\U0001f468\u200d\U0001f469", "\u0928\u092e\u0938\u094d", "...",
    "!!", "/", "//", "://", "http://a.b/c?d=e&f", "{}", "();", "==", "->", "#include", "\\n", "\"",
    "\u201c", "\u2019", "\u2014", "\u2026", "\u3002", "\u060c", "$", "\u20ac", "+", "|", "~", "`", "^",
]


class TextMaker:
    def __init__(self, seed, real, extra):
        self.random = random.Random(seed)
        self.real = real
        self.pieces = PIECES + extra

    def code_points(self, count):
        r = self.random
        out = []
        low, high = r.choice(RANGES)
        for _ in range(count):
            if r.random() < 0.3:
                low, high = r.choice(RANGES)
            c = r.randrange(low, high)
            out.append("x" if 0xD800 <= c <= 0xDFFF else chr(c))
        return "".join(out)

    def real_slice(self):
        r = self.random
        text = r.choice(self.real)
        start = r.randrange(len(text))
        return text[start:start + r.choice([5, 20, 60, 200])]

    def long_run(self):
        r = self.random
        unit = r.choice(["a", "ab", " ", "\n", "=", "-", "ha", "0", "\u4f60", "\u00e9", "\u2581",
                         "\U0001f600", "abc d", "\t"])
        return unit * r.choice([10, 40, 130, 300])

    def text(self):
        r = self.random
        kind = r.random()
        if kind < 0.25:
            return self.code_points(r.randint(0, 30))
        if kind < 0.55:
            return self.real_slice()
        if kind < 0.57:
            return self.long_run()
        parts = []
        for _ in range(r.randint(1, 12)):
            pick = r.random()
            if pick < 0.75:
                parts.append(r.choice(self.pieces))
            elif pick < 0.9:
                parts.append(self.code_points(r.randint(1, 3)))
            else:
                parts.append(self.real_slice()[:12])
        return "".join(parts)


# --- our side ----------------------------------------------------------------------------------

def pack(texts):
    encoded = [text.encode("utf-8") for text in texts]
    return b"".join(struct.pack("<I", len(data)) + data for data in encoded)


def ours(program, path, texts, *flags):
    result = subprocess.run([program, "encode", path, *flags], input=pack(texts),
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if result.returncode != 0:
        raise RuntimeError(result.stderr.decode())
    data, at, out = result.stdout, 0, []
    for _ in texts:
        (count,) = struct.unpack_from("<I", data, at)
        at += 4
        ids = list(struct.unpack_from(f"<{count}I", data, at))
        at += 4 * count
        spans = decoded = None
        if "--spans" in flags:
            flat = struct.unpack_from(f"<{2 * count}I", data, at)
            spans = list(zip(flat[::2], flat[1::2]))
            at += 8 * count
        if "--decode" in flags:
            (size,) = struct.unpack_from("<I", data, at)
            decoded = data[at + 4:at + 4 + size].decode("utf-8")
            at += 4 + size
        out.append((ids, spans, decoded))
    return out


def byte_spans(text, offsets):
    """Spans of code points as spans of bytes."""
    position = [0]
    for c in text:
        position.append(position[-1] + len(c.encode("utf-8")))
    return [(position[a], position[b]) for a, b in offsets]


def compare(program, name, path, texts, spans):
    reference = Tokenizer.from_file(path)
    reference.no_truncation()
    reference.no_padding()
    wrong = {"ids": 0, "special": 0, "decode": 0, "spans": 0}
    shown = 0
    flags = ["--decode"] + (["--spans"] if spans else [])
    mine = ours(program, path, texts, *flags)
    special = ours(program, path, texts, "--special")
    step = 5000
    for start in range(0, len(texts), step):
        part = texts[start:start + step]
        expected = reference.encode_batch(part, add_special_tokens=False)
        expected_special = reference.encode_batch(part, add_special_tokens=True)
        decoded = reference.decode_batch([e.ids for e in expected], skip_special_tokens=False)
        for i, text in enumerate(part):
            ids, our_spans, our_text = mine[start + i]
            bad = []
            if ids != expected[i].ids:
                bad.append(("ids", expected[i].ids, ids))
            if special[start + i][0] != expected_special[i].ids:
                bad.append(("special", expected_special[i].ids, special[start + i][0]))
            if our_text != decoded[i]:
                bad.append(("decode", decoded[i], our_text))
            if spans and our_spans != byte_spans(text, expected[i].offsets):
                bad.append(("spans", byte_spans(text, expected[i].offsets), our_spans))
            for kind, want, got in bad:
                wrong[kind] += 1
                if shown < 3:
                    shown += 1
                    print(f"  {name} {kind}: {text!r}\n    expected {want!r}\n    got      {got!r}")
    total = sum(wrong.values())
    print(f"{name}: {len(texts)} texts, {total} differences" + (f" {wrong}" if total else ""),
          flush=True)
    return total


# --- configurations ----------------------------------------------------------------------------

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN35 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
          r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
          r"\s*[\r\n]|\s+(?!\S)|\s+")
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
TEKKEN = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
            r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
KIMI = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits in threes from the right (SuperBPE), and the splits of two older families, one after another.
RIGHT_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))|" + LLAMA3.replace(r"\p{N}{1,3}|", "")
DEEPSEEK_CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+"]
DEEPSEEK_LLM = [r"[\r\n]", r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕ]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+"]
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def byte_level_configs():
    byte_level = pre_tokenizers.ByteLevel
    plain = byte_level(add_prefix_space=False, use_regex=False)
    sequence = pre_tokenizers.Sequence
    yield "gpt2", None, byte_level(add_prefix_space=False, use_regex=True)
    yield "gpt2-prefix", None, byte_level(add_prefix_space=True, use_regex=True)
    yield "gpt2-nfc", normalizers.NFC(), byte_level(add_prefix_space=False, use_regex=True)
    for name, pattern in [("llama3", LLAMA3), ("qwen35", QWEN35), ("cl100k", CL100K), ("o200k", O200K),
                          ("tekken", TEKKEN), ("kimi", KIMI), ("bloom", BLOOM), ("qwen2", QWEN2),
                          ("gpt2-pattern", GPT2), ("right-threes", RIGHT_THREES)]:
        yield name, None, sequence([split(pattern), plain])
    yield "cl100k-removed", None, sequence([split(CL100K, "removed", True), plain])
    yield "deepseek", None, sequence([
        split(r"\p{N}{1,3}"), split(r"[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK), plain])
    digits = pre_tokenizers.Digits(individual_digits=True)
    yield "deepseek-coder", None, sequence([split(part) for part in DEEPSEEK_CODER] + [digits, plain])
    yield "deepseek-llm", None, sequence([split(part) for part in DEEPSEEK_LLM] + [digits, plain])
    yield "command-r", normalizers.NFC(), sequence([digits, byte_level(add_prefix_space=False, use_regex=True)])
    yield "codegen-groups", None, sequence([
        pre_tokenizers.Digits(individual_digits=False), byte_level(add_prefix_space=False, use_regex=True)])
    yield "words", None, sequence([split(r"\w+|\W"), split(r"[\w]+|[^\w\s]"), plain])
    yield "borders", None, sequence([split(r"\s+|(?<=\w)(?=\W)|\d{3}(?!\d)|\S"), plain])
    yield "starcoder", None, sequence([pre_tokenizers.Digits(individual_digits=True),
                                       byte_level(add_prefix_space=False, use_regex=True)])
    yield "falcon", None, sequence([
        pre_tokenizers.Punctuation("contiguous"), byte_level(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False), split("[0-9][0-9][0-9]")])
    yield "byte-normalizer", normalizers.Sequence([normalizers.NFKC(), normalizers.ByteLevel()]), split(
        "Ġ|Ċ", "merged_with_next")
    yield "lookarounds", None, sequence([
        split(r"(?<=[a-z])(?=[A-Z])|\d{2,4}?|x{,2}y|(?>ab|a)c|^\s+|\s+$|[^\S\n]*\n"), plain])


def text_configs():
    sequence = normalizers.Sequence
    metaspace = pre_tokenizers.Metaspace
    for scheme in ("always", "first", "never"):
        for splits in (True, False):
            yield (f"metaspace-{scheme}-{'split' if splits else 'whole'}", None,
                   metaspace(prepend_scheme=scheme, split=splits))
    yield "metaspace-first-nfkc", normalizers.NFKC(), metaspace(prepend_scheme="first")
    yield "metaspace-first-strip", normalizers.Strip(True, False), metaspace(prepend_scheme="first")
    yield "llama-legacy", sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None
    yield "gemma", normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")
    yield "phi-strip", sequence([normalizers.Strip(True, True), normalizers.Replace(Regex(" {2,}"), " "),
                                 normalizers.Replace(" ", "▁")]), None
    yield "albert-like", sequence([normalizers.Nmt(), normalizers.NFKD(), normalizers.StripAccents(),
                                   normalizers.Lowercase()]), metaspace()
    yield "bert-like", sequence([normalizers.NFD(), normalizers.Lowercase()]), pre_tokenizers.BertPreTokenizer()
    yield "whitespace", normalizers.Lowercase(), pre_tokenizers.Whitespace()
    yield "whitespace-split", normalizers.NFD(), pre_tokenizers.WhitespaceSplit()
    yield "whitespace-metaspace", None, pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), metaspace(prepend_scheme="first")])
    yield "digits", None, pre_tokenizers.Sequence([pre_tokenizers.Digits(True), metaspace()])
    yield "digits-groups", None, pre_tokenizers.Sequence([metaspace(), pre_tokenizers.Digits(False)])
    for behavior in ("isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous"):
        yield f"punctuation-{behavior}", None, pre_tokenizers.Punctuation(behavior)
        yield f"split-{behavior}", None, pre_tokenizers.Split(" ", behavior)
        yield f"split-invert-{behavior}", None, split(r"\w+|[^\w\s]+", behavior, True)
    yield "fixed", None, pre_tokenizers.FixedLength(3)
    yield "delimiter", None, pre_tokenizers.Split("e", "removed")


def save(tokenizer, folder, name):
    path = os.path.join(folder, name + ".json")
    tokenizer.save(path)
    return path


ADDED = [AddedToken("<mask>", lstrip=True, special=True, normalized=False),
         AddedToken("<|user|>", rstrip=True, special=True, normalized=False),
         AddedToken("<|both|>", lstrip=True, rstrip=True, normalized=False),
         AddedToken("hello", single_word=True, normalized=False),
         AddedToken("Stra\u00dfe", normalized=True), AddedToken("Caf\u00e9 X", normalized=True),
         AddedToken("<|us", normalized=False), AddedToken("\n\n\n", normalized=False)]


def made_tokenizers(folder, text_files, is_wanted):
    """(name, path, whether spans follow our rule); trains those alone whose beginning is_wanted."""
    for name, normalizer, pre_tokenizer in byte_level_configs():
        if not is_wanted("made/" + name):
            continue
        tokenizer = Tokenizer(models.BPE(ignore_merges=name in ("llama3", "kimi")))
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=2000, show_progress=False,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                      special_tokens=["<s>", "</s>"])
        tokenizer.train(text_files, trainer)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
        # Composition joins characters whose bytes the library leaves out of the spans.
        has_same_spans = normalizer is None
        yield "made/" + name, save(tokenizer, folder, name), has_same_spans
        if name in ("gpt2-nfc", "o200k", "gpt2-prefix"):
            tokenizer.add_tokens(ADDED)
            yield "made/" + name + "-added", save(tokenizer, folder, name + "-added"), has_same_spans

    for name, normalizer, pre_tokenizer in text_configs():
        for kind, options in (("fallback", {"byte_fallback": True, "fuse_unk": True}),
                              ("fused", {"fuse_unk": True}), ("unk", {}), ("no-unk", None)):
            if not is_wanted(f"made/{name}-{kind}"):
                continue
            if kind in ("unk", "no-unk") and not name.startswith(("metaspace", "llama", "whitespace")):
                continue
            special = ["<unk>", "<s>", "</s>"] if options is not None else ["<s>", "</s>"]
            if kind == "fallback":
                special += [f"<0x{byte:02X}>" for byte in range(256)]
            settings = dict(options or {})
            if options is not None:
                settings["unk_token"] = "<unk>"
            tokenizer = Tokenizer(models.BPE(**settings))
            if normalizer is not None:
                tokenizer.normalizer = normalizer
            if pre_tokenizer is not None:
                tokenizer.pre_tokenizer = pre_tokenizer
            training = Tokenizer(models.BPE(**settings))
            if normalizer is not None:
                training.normalizer = normalizer
            # A whole text as one word would not train; the merges are those of words.
            training.pre_tokenizer = pre_tokenizer or pre_tokenizers.Split("▁", "merged_with_next")
            if isinstance(training.pre_tokenizer, pre_tokenizers.Metaspace):
                training.pre_tokenizer = pre_tokenizers.Metaspace()
            trainer = trainers.BpeTrainer(vocab_size=1500, show_progress=False, special_tokens=special,
                                          limit_alphabet=200)
            training.train(text_files, trainer)
            model = json.loads(training.to_str())
            spec = json.loads(tokenizer.to_str())
            spec["model"] = model["model"]
            # Special tokens stay in the vocabulary but the byte tokens are no added tokens.
            spec["added_tokens"] = [t for t in model["added_tokens"] if not t["content"].startswith("<0x")]
            tokenizer = Tokenizer.from_str(json.dumps(spec))
            if name.startswith(("metaspace", "whitespace-metaspace", "digits", "albert")):
                scheme = "never" if "never" in name else "first" if "first" in name else "always"
                tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
            elif name in ("llama-legacy", "gemma", "phi-strip"):
                tokenizer.decoder = decoders.Sequence(
                    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                     decoders.Strip(" ", 1, 0)])
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
            label = f"{name}-{kind}"
            has_same_spans = kind != "no-unk" and normalizer is None
            yield "made/" + label, save(tokenizer, folder, label), has_same_spans
            if name in ("llama-legacy", "metaspace-first-whole", "whitespace", "albert-like"):
                tokenizer.add_tokens(ADDED)
                yield "made/" + label + "-added", save(tokenizer, folder, label + "-added"), False

    for name, options, decoder in (
            ("end-of-word", {"end_of_word_suffix": "</w>"}, decoders.BPEDecoder()),
            ("subword-prefix", {"continuing_subword_prefix": "##"}, decoders.WordPiece())):
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", **options))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.decoder = decoder
        trainer = trainers.BpeTrainer(vocab_size=1500, show_progress=False, special_tokens=["<unk>"],
                                      limit_alphabet=200, **options)
        tokenizer.train(text_files, trainer)
        tokenizer.post_processor = processors.RobertaProcessing(("<unk>", 0), ("<unk>", 0))
        yield "made/" + name, save(tokenizer, folder, name), False


# --- time --------------------------------------------------------------------------------------

LIBRARY_TIMER = """
import json, pickle, sys, time
from tokenizers import Tokenizer
path, repeats = sys.argv[1], int(sys.argv[2])
tokenizer = Tokenizer.from_file(path)
texts = pickle.load(sys.stdin.buffer)
best, first = [1e9, 1e9], None
for _ in range(repeats):
    for call in (tokenizer.encode_batch_fast, tokenizer.encode_batch):
        wall, cpu = time.perf_counter(), time.process_time()
        encodings = call(texts, add_special_tokens=False)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        best = [min(best[0], wall), min(best[1], cpu)]
        first = first or cpu
print(json.dumps({"seconds": best[0], "cpu_seconds": best[1], "first_cpu_seconds": first}))
"""


def measure(program, name, path, texts, repeats):
    """The best of `repeats`, by the clock and by processor time, and the first pass, which finds no
    word in a cache; the faster of the library's two batch calls. The library reads its thread settings
    once, so each count has its own process."""
    size = sum(len(text.encode("utf-8")) for text in texts) / 1e6
    print(f"{name}: {size:.1f} MB in {len(texts)} texts", flush=True)
    for threads in (1, 2):
        out = subprocess.run([program, "time", path, str(threads), str(repeats)], input=pack(texts),
                             stdout=subprocess.PIPE, check=True).stdout
        mine = json.loads(out)
        environment = dict(os.environ, RAYON_NUM_THREADS=str(threads),
                           TOKENIZERS_PARALLELISM="true" if threads > 1 else "false")
        out = subprocess.run([sys.executable, "-c", LIBRARY_TIMER, path, str(repeats)],
                             input=pickle.dumps(texts), env=environment, stdout=subprocess.PIPE,
                             check=True).stdout
        theirs = json.loads(out)
        for key, unit in (("seconds", "MB/s"), ("cpu_seconds", "MB per processor second"),
                          ("first_cpu_seconds", "MB per processor second, first pass")):
            a, b = size / mine[key], size / theirs[key]
            print(f"  {threads} thread(s): ours {a:.1f}, library {b:.1f} {unit} ({a / b:.1f}x)", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--program", required=True, help="the built tokenize_stream")
    parser.add_argument("--data", required=True, help="the folder of test data")
    parser.add_argument("--count", type=int, default=100000, help="texts for each tokenizer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--made", action="store_true", help="files made by the library")
    parser.add_argument("--time", action="store_true", help="throughput instead of comparison")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="names that contain one of these")
    args = parser.parse_args()

    text_folder = os.path.join(args.data, "text")
    text_files = sorted(os.path.join(text_folder, name) for name in os.listdir(text_folder))
    real = [read(path) for path in text_files]
    gsm = os.path.join(args.data, "sft", "gsm8k_test.jsonl")
    real.append(read(gsm))

    def is_wanted(name):
        return not args.only or any(part in name for part in args.only)

    found = []
    with tempfile.TemporaryDirectory() as folder:
        if args.made:
            candidates = made_tokenizers(folder, text_files, is_wanted)
        else:
            candidates = []
            for root in ("tokenizers", "models"):
                for base, _, files in sorted(os.walk(os.path.join(args.data, root))):
                    if "tokenizer.json" not in files:
                        continue
                    path = os.path.join(base, "tokenizer.json")
                    name = os.path.relpath(base, args.data)
                    candidates.append((name, path, "NFC" not in read(path)[-200000:] and "nfc" not in name
                                       and "qwen3" not in name))
        differences = 0
        for name, path, spans in candidates:
            if not is_wanted(name):
                continue
            found.append(name)
            if args.time:
                wiki = [line for line in read(os.path.join(text_folder, "wiki_demo.txt")).split("\n") if line]
                plays = read(os.path.join(text_folder, "tinyshakespeare.txt")).split("\n\n")
                rows = [json.loads(line) for line in read(gsm).split("\n") if line]
                gsm_texts = [row["question"] + "\n" + row["answer"] for row in rows]
                measure(args.program, name, path, (wiki + plays + gsm_texts) * 2, args.repeats)
                continue
            added = [t["content"] for t in json.loads(read(path)).get("added_tokens", [])]
            maker = TextMaker(args.seed, real, added[:40])
            texts = [maker.text() for _ in range(args.count)]
            differences += compare(args.program, name, path, texts, spans)
    if not found:
        sys.exit("no tokenizer found")
    if not args.time:
        print(f"{len(found)} tokenizers, {differences} differences")
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
