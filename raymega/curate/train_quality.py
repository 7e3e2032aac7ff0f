"""Trains the quality model: logistic regression on hashed words, good documents against raw ones.

MT-NLG trained such a classifier on curated text against Common Crawl. Training runs in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raymega.curate.steps.quality_model import FEATURE_BITS, LinearModel, features
from raymega.errors import ConfigError, counted
from raymega.prepare.documents import read_documents
from raymega.prepare.groups import make_groups
from raymega.prepare.sources import list_files, split_of

HELD_OUT, EPOCHS = 0.1, 8
LEARNING_RATE, L2 = 0.5, 1e-6
BATCH_DOCUMENTS = 32
Example = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], float]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityData:
    """Documents of a training.

    Attributes:
        good: Files, folders or URIs with documents as they should be.
        raw: Files, folders or URIs with documents as they come.
        include: Patterns of files to read; a file must match at least one.
        exclude: Patterns of files to leave out; a file must match none.
        text_key: Key of JSON objects or column of tables that holds the text.
    """

    good: tuple[str, ...]
    raw: tuple[str, ...]
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    text_key: str = "text"


def train_quality_model(
    data: QualityData, out: str, *, on_progress: Callable[[str, int, int], None]
) -> dict[str, float]:
    """Train a model and write its file; the same documents give the same bytes.

    Args:
        data: Documents.
        out: Path of the model's file.
        on_progress: Callback with (phase, done, total).

    Returns:
        Number of documents, and on those held out the accuracy and the area under the ROC curve.

    Raises:
        ConfigError: An input or the output is invalid, or one of the two kinds has too few documents.
    """
    place = Path(out)
    if place.is_dir() or not place.absolute().parent.is_dir():
        why = "it is a folder" if place.is_dir() else f"there is no folder {place.parent}"
        raise ConfigError(
            fact=f"--out {out}: {why}",
            rule="the model is a file in a folder that exists",
            remedy="give another --out",
        )
    train, held = list[Example](), list[Example]()
    for label, inputs in ((1.0, data.good), (0.0, data.raw)):
        for text in _texts(inputs, data):
            kept = held if split_of(text, HELD_OUT) == "valid" else train
            kept.append((*features(text), label))
    labels = [example[2] for example in train]
    if len(set(labels)) < 2 or len({example[2] for example in held}) < 2:
        raise ConfigError(
            fact=f"--good has {counted(int(sum(labels)), 'document')} to train on, --raw {labels.count(0.0)}",
            rule="both need some, and a tenth of each is held out to measure",
            remedy="give some dozens of documents of each kind",
        )
    model = fit(train, on_progress=on_progress)
    Path(out).write_bytes(model.encode())
    truth = np.array([example[2] for example in held])
    logits = np.array([_logit(model.weights, model.bias, example) for example in held])
    return {
        "documents": float(len(train)), "held_out_documents": float(len(held)),
        "accuracy": float(np.mean((logits > 0) == (truth > 0.5))), "roc_auc": roc_auc(logits, truth),
    }  # fmt: skip


def fit(train: list[Example], *, on_progress: Callable[[str, int, int], None]) -> LinearModel:
    """Return the model that AdaGrad finds (Duchi et al. 2011), with both kinds of equal weight."""
    weights, bias = np.zeros(1 << FEATURE_BITS), 0.0
    squares, bias_squares = np.full(1 << FEATURE_BITS, 1e-8), 1e-8
    # Both kinds weigh the same, however many there are of each.
    share = sum(example[2] for example in train) / len(train)
    order = np.random.default_rng(0)
    for epoch in range(EPOCHS):
        shuffled = order.permutation(len(train))
        for start in range(0, len(train), BATCH_DOCUMENTS):
            batch = [train[int(at)] for at in shuffled[start : start + BATCH_DOCUMENTS]]
            places, slopes, bias_slope = _gradient(batch, weights, bias, share)
            slopes += L2 * weights[places]
            squares[places] += slopes**2
            bias_squares += bias_slope**2
            weights[places] -= LEARNING_RATE * slopes / np.sqrt(squares[places])
            bias -= LEARNING_RATE * bias_slope / np.sqrt(bias_squares)
        on_progress("training", epoch + 1, EPOCHS)
    return LinearModel(weights=weights.astype(np.float32), bias=float(bias))


def roc_auc(scores: Values, truth: Values) -> float:
    """Return the probability that a good document has a higher score than a raw one."""
    _, ranks, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # Equal scores share the mean of their ranks.
    means = np.cumsum(counts) - (counts - 1) / 2
    good = truth > 0.5
    above = means[ranks][good].sum() - good.sum() * (good.sum() + 1) / 2
    return float(above / (good.sum() * (~good).sum()))


def _gradient(
    batch: list[Example], weights: Values, bias: float, share: float
) -> tuple[npt.NDArray[np.int64], Values, float]:
    """Return the places of the batch's words, the slopes there, and that of the bias."""
    slopes = np.array(
        [
            (1 / (1 + np.exp(-_logit(weights, bias, example))) - example[2])
            / (2 * len(batch) * (share if example[2] else 1 - share))
            for example in batch
        ]
    )
    every = np.concatenate([example[0] for example in batch])
    values = np.concatenate(
        [slope * example[1] for slope, example in zip(slopes, batch, strict=True)]
    )
    places, inverse = np.unique(every, return_inverse=True)
    sums = np.bincount(inverse, weights=values, minlength=len(places)).astype(np.float64)
    return places, sums, float(slopes.sum())


def _logit(weights: npt.NDArray[np.floating], bias: float, example: Example) -> float:
    return float(weights[example[0]].astype(np.float64) @ example[1] + bias)


def _texts(inputs: tuple[str, ...], data: QualityData) -> Iterator[str]:
    files = list_files(sorted(inputs), include=data.include, exclude=data.exclude)
    for group in make_groups(files, text_key=data.text_key):
        for document in read_documents(group):
            yield document.text
