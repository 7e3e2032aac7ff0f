"""Datasets in folders, beside whose shards a command may store what it computed of them."""

from __future__ import annotations

from raymega.config.data import is_computed
from raymega.data.megatron import is_megatron
from raymega.data.streaming.remote_dataset import is_remote
from raymega.errors import Fault


def has_folder(path: str) -> bool:
    """Return whether a path is that of a prepared dataset in a folder, beside whose shards something can be written."""
    return not (is_computed(path) or is_remote(path) or is_megatron(path))


def no_folder(subject: str, path: str, *, stored: str, other: str) -> Fault:
    """Return the fault of a dataset beside which nothing can be stored.

    Args:
        subject: Text in front of "the dataset"; may be empty.
        path: Path of the dataset.
        stored: Sentence that says what lies beside the shards, up to that word.
        other: Setting that needs no such file.
    """
    return Fault(
        fact=f"{subject}the dataset {path!r}",
        rule=f"{stored} beside the shards of a dataset in a folder",
        remedy=f"copy the dataset to a folder, or set {other}",
    )
