#!/usr/bin/env python3
"""Collects real text from unpacked packages or source trees into one file for `data.train`, documents separated by
<|endoftext|>: prose first (manuals, HTML without its tags, dictionaries), then source code, until --megabytes.
Files that repeat, binary files and HTML that is mostly navigation are left out.

    apt-get download linux-source-6.1 openjdk-17-doc python3.11-doc rust-doc perl-doc dict-gcide
    for p in *.deb; do dpkg -x $p tree; done; tar xf tree/usr/src/linux-source-6.1.tar.xz -C tree
    python3 tools/bench/make_corpus.py tree -o corpus.txt --megabytes 210
"""

import argparse
import gzip
import hashlib
import html
import os
import random
import re

PROSE = {".txt", ".rst", ".html", ".htm", ".md", ".pod", ".dz", ".noun", ".verb", ".adj", ".adv", ".gz"}
CODE = {".c", ".h", ".rs", ".py", ".S"}
SEPARATOR = "<|endoftext|>"


def read_text(path):
    opener = gzip.open if path.endswith((".gz", ".dz")) else open
    try:
        with opener(path, "rb") as file:
            return file.read().decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError):
        return None


def strip_html(text):
    text = re.sub(r"(?is)<(script|style|head|nav|footer)\b.*?</\1>", " ", text)
    text = re.sub(r"(?is)</?(p|div|li|tr|h[1-6]|pre|br|section|dt|dd|table)\b[^>]*>", "\n", text)
    text = html.unescape(re.sub(r"(?s)<[^>]+>", "", text))
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def kind_of(path):
    suffix = os.path.splitext(path)[1]
    return "prose" if suffix in PROSE else "code" if suffix in CODE else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--megabytes", type=float, default=210)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    files = {"prose": [], "code": []}
    for folder in options.folders:
        for root, _, names in os.walk(folder):
            for name in names:
                path = os.path.join(root, name)
                kind = kind_of(path)
                if kind and not os.path.islink(path):
                    files[kind].append(path)
    documents = []
    seen = set()
    size = 0
    counts = {}
    for kind in ("prose", "code"):
        random.Random(options.seed).shuffle(files[kind].sort() or files[kind])
        for path in files[kind]:
            if size >= options.megabytes * 1e6:
                break
            text = read_text(path)
            if text is None or "\0" in text:
                continue
            if ".htm" in path:
                text = strip_html(text)
            # A page that is mostly short lines is an index; it teaches nothing.
            lines = text.splitlines()
            if len(text) < 1000 or SEPARATOR in text or (kind == "prose" and len(text) < 20 * len(lines)):
                continue
            digest = hashlib.sha1(text.encode()).digest()
            if digest in seen:
                continue
            seen.add(digest)
            encoded = text.encode()
            size += len(encoded)
            counts[kind] = counts.get(kind, 0) + len(encoded)
            documents.append(encoded)
    random.Random(options.seed).shuffle(documents)
    with open(options.output, "wb") as out:
        for document in documents:
            out.write(document + SEPARATOR.encode())
    kinds = ", ".join(f"{bytes_ / 1e6:.1f} MB of {kind}" for kind, bytes_ in counts.items())
    print(f"{options.output}: {len(documents)} documents, {size / 1e6:.1f} MB: {kinds}")


if __name__ == "__main__":
    main()
