"""Trains a small model on curated text and on raw text, and compares the loss on clean text of another book.

    # of the packages of benchmarks/curation.py all but debian-policy, debian-policy-ja and debian-history
    for each in debian-{faq,handbook,reference}*.deb developers-*.deb maint-*.deb; do dpkg-deb -x $each books; done
    dpkg-deb -x debian-policy_*.deb held
    python -m benchmarks.curated_model books/usr/share held/usr/share/doc/debian-policy [--seeds 1 2 3] [--steps N]

Both read the same number of tokens, bytes of text. Raw text is all pages; curated text is what ``RECIPE``
leaves of them. A line of JSON for each run, then the mean difference and its spread over the seeds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, stdev
from unittest.mock import patch

import torch

from benchmarks.one_rank import OneRank
from raymega.config.load import parse_mapping
from raymega.curate import pipeline as curation
from raymega.curate.checks import CurateOptions
from raymega.plan.run_plan import make_plan
from raymega.prepare import pipeline as preparation
from raymega.prepare.options import PrepareOptions
from raymega.train.forward_backward import evaluate

RECIPE = [
    "extract", "mend", {"language": {"keep": ["en"]}}, {"quality": {"rules": ["gopher", "gopher_repetition"]}},
    "exact", "near", "lines",
]  # fmt: skip
HELD_RECIPE = ["extract", {"language": {"keep": ["en"]}}, "exact", "near"]
SEQ_LEN, ROWS, EVAL_SAMPLES = 128, 16, 256
# Ids of bytes, and the one that ends a document.
VOCABULARY = 257


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("books", type=Path)
    parser.add_argument("held", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, _in_this_process():
        data = {name: str(Path(folder, name)) for name in ("raw", "curated", "held")}
        books, held = (
            _pages(each, Path(folder, f"{each.name}-pages"))
            for each in (options.books, options.held)
        )
        _prepared(books, data["raw"])
        for name, pages, steps in (("curated", books, RECIPE), ("held", held, HELD_RECIPE)):
            _prepared(_curated(pages, Path(folder, f"{name}-text"), steps), data[name])
        found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in ("raw", "curated")}
        for seed in options.seeds:
            for name, losses in found.items():
                losses[seed] = _loss(data[name], data["held"], seed, options.steps)
                print(json.dumps({"text": name, "seed": seed} | losses[seed]), flush=True)
    gains = [found["raw"][seed]["loss"] - found["curated"][seed]["loss"] for seed in options.seeds]
    spread = {
        f"{name}_spread": round(_spread([run["loss"] for run in runs.values()]), 4)
        for name, runs in found.items()
    }
    facts = {
        "tokens": options.steps * ROWS * SEQ_LEN,
        "mean_gain": round(fmean(gains), 4),
        "least_gain": round(min(gains), 4),
        "gain_spread": round(_spread(gains), 4),
    }
    print(json.dumps(facts | spread))


def _pages(folder, out):
    """Copy the pages of packages, some of whose links lead to packages that are not here."""
    out.mkdir()
    for number, path in enumerate(sorted(folder.rglob("*.html"))):
        if path.is_file() and not path.is_symlink():
            shutil.copyfile(path, out / f"{number:05d}.html")
    return out


def _in_this_process():
    """Patch curation and preparation to run their tasks here, without Ray."""
    return patch.multiple(
        curation, on_cluster=lambda items, run: map(run, items), session_at=lambda _: nullcontext()
    )


def _curated(pages, out, steps):
    recipe = Path(f"{out}.yaml")
    recipe.write_text(json.dumps({"steps": steps}))
    options = CurateOptions(
        inputs=(str(pages),), out=str(out), recipe=str(recipe), include=("*.html",)
    )
    counts = curation.curate(options, on_progress=lambda *_: None).counts["steps"]
    kept = {step["name"]: [step["documents_out"], step["bytes_out"]] for step in counts}
    print(json.dumps({"corpus": out.name, "documents_and_bytes": kept}), flush=True)
    return out


def _prepared(text, out):
    options = PrepareOptions(
        inputs=(str(text),), out=out, tokenizer="bytes", valid_fraction=0.0, include=("*.html", "*.parquet"),
    )  # fmt: skip
    with patch.multiple(
        preparation,
        on_cluster=lambda items, run: map(run, items),
        session_at=lambda _: nullcontext(),
    ):
        preparation.prepare(options, on_progress=lambda *_: None)


def _loss(data, held, seed, steps):
    """Train a model; return its loss on the held-out text in nats per byte, and the mean of its last steps."""
    job = {
        "run": {"name": "curated", "steps": steps, "eval_samples": EVAL_SAMPLES, "seed": seed},
        "model": {
            "family": "llama", "num_layers": 2, "hidden_size": 96, "num_heads": 4, "num_kv_heads": 4,
            "ffn_hidden_size": 256, "vocab_size": VOCABULARY, "max_positions": SEQ_LEN,
        },
        "data": {
            "path": data, "seq_len": SEQ_LEN, "global_batch_size": ROWS,
            "validation": [{"name": "held", "path": held, "split": "train"}],
        },
        "schedule": {"micro_batch_size": ROWS},
        "optimizer": {"lr": 3e-3, "lr_warmup_steps": steps // 10},
        "precision": {"dtype": "float32"},
    }  # fmt: skip
    started = time.process_time()
    step = OneRank(make_plan(parse_mapping(job).job()))
    losses = [step() for _ in range(steps)]
    found = evaluate(step.parts)["eval/loss"]
    return {
        "loss": round(found, 4), "last_steps": round(fmean(losses[-20:]), 4),
        "cpu_s": round(time.process_time() - started, 1),
    }  # fmt: skip


def _spread(values):
    return stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
