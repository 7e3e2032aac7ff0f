"""A small corpus of real text with copies, near duplicates, and lines that stand everywhere."""

import inspect
import json
import os
import random
from contextlib import nullcontext
from pathlib import Path

from raymega.curate import pipeline
from raymega.curate.checks import CurateOptions
from raymega.curate.document import read_curated

STEPS = [
    "mend",
    "personal",
    "exact",
    {"near": {"threshold": 0.8}},
    "lines",
    {"sample": {"rate": 0.95}},
]
FOOTER = "This page is part of the manual of the library, all rights reserved."


def in_this_process():
    """The names to replace so that tasks run here, one after the other."""
    yield pipeline, "on_cluster", lambda items, run: map(run, items)
    yield pipeline, "session_at", lambda _: nullcontext()
    # What a power cut would take is not in question here.
    yield os, "fsync", lambda _: None


def prose():
    """Documentation of the standard library, in words of English."""
    import argparse, asyncio, collections, decimal, email, logging, pathlib, subprocess, tarfile, unittest  # noqa: E401, I001

    modules = (
        argparse,
        asyncio,
        collections,
        decimal,
        email,
        logging,
        pathlib,
        subprocess,
        tarfile,
        unittest,
    )
    texts = {}
    for module in modules:
        for name, part in sorted(vars(module).items()):
            text = (
                inspect.getdoc(part) if inspect.isclass(part) or inspect.isfunction(part) else None
            )
            if text and len(text) > 150:
                texts[f"{module.__name__}.{name}"] = text
    return list(dict.fromkeys(texts.values()))


def edited(text, share, seed=0):
    """A text of which a share of the words is another."""
    draw, words = random.Random(seed), text.split(" ")
    return " ".join(draw.choice(words) if draw.random() < share else word for word in words)


def corpus_texts():
    """Texts, copies of every fifth, and near duplicates of every seventh; each with a line that all have."""
    texts = prose()[:48]
    copies = texts[::5]
    nears = [f"{text}\nOne more line, number {number}." for number, text in enumerate(texts[::7])]
    return [f"{text}\n{FOOTER}" for text in [*texts, *copies, *nears]]


def write_corpus(folder, texts):
    """Two files of JSON lines, in a shuffled order."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    shuffled = random.Random(3).sample(texts, len(texts))
    for name, part in (("a", shuffled[::2]), ("b", shuffled[1::2])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        Path(folder, f"{name}.jsonl").write_text(lines)


def curated(inputs, out, steps=STEPS, **changes):
    """Curate; the recipe is written beside the output."""
    recipe = Path(f"{out}.yaml")
    recipe.write_text(json.dumps({"steps": steps}))
    inputs = tuple(map(str, inputs if isinstance(inputs, list | tuple) else [inputs]))
    options = CurateOptions(inputs=inputs, out=str(out), recipe=str(recipe), **changes)
    return pipeline.curate(options, on_progress=lambda *_: None)


def documents(done):
    """The documents of a finished corpus."""
    return [each for name in done.files for each in read_curated(Path(done.uri, name).read_bytes())]


def content(out):
    """Bytes of the corpus and its counts."""
    out = Path(out)
    return {
        path.name: path.read_bytes()
        for path in [*out.glob("*.parquet"), out / "_report/counts.json"]
    }
