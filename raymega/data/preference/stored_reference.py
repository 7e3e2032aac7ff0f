"""Reference log-probabilities of a preference dataset's answers, in a file beside its shards.

`raymega.evaluate.reference` computes them once. A job may use them if its answers are the same, and cut and
counted as they were then.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raymega.data.format import SPLITS
from raymega.data.preference.dataset_folder import has_folder
from raymega.data.streaming.remote_dataset import local_folder
from raymega.errors import ConfigError, Fault

CONTENT = "content"
"""Name of the digest of the split that the log-probabilities are of."""
Floats = npt.NDArray[np.float64]


def reference_path(path: str, split: str) -> Path:
    """Return the file of the reference of a dataset's split."""
    return local_folder(path) / f"reference-{split}.npz"


def reference_digests(path: str) -> dict[str, str]:
    """Return a digest of the stored log-probabilities of each split of a dataset that has some, by split."""
    if not has_folder(path):
        return {}
    files = {split: reference_path(path, split) for split in SPLITS}
    return {split: _digest(file) for split, file in files.items() if file.is_file()}


def _digest(file: Path) -> str:
    with np.load(file) as found:
        return blake2b(found["log_probs"].tobytes(), digest_size=8).hexdigest()


def write_reference(
    file: Path, log_probs: Floats, how: Mapping[str, object], *, content: str
) -> None:
    """Write log-probabilities [N, 2] of all pairs, of which split's ``content``, by which model and cut they are."""
    # written beside and renamed, so that a reader never finds half a file
    packed = io.BytesIO()
    np.savez(packed, log_probs=log_probs, how=np.array(json.dumps({**how, CONTENT: content})))
    beside = file.with_suffix(".tmp")
    beside.write_bytes(packed.getvalue())
    beside.replace(file)


def read_reference(path: str, split: str, wanted: Mapping[str, object], *, content: str) -> Floats:
    """Return the stored log-probabilities, [N, 2].

    Args:
        path: Folder of the dataset.
        split: Name of the split.
        wanted: Cut and labels of answers in this job.
        content: Digest of the split's content.

    Raises:
        ConfigError: There are none, or they are of answers that were cut or counted otherwise.
    """
    file = reference_path(path, split)
    remedy = "run `raymega data reference JOB.yaml` with this job's file and settings"
    if not file.is_file():
        fault = Fault(
            fact=f"preference.reference=stored, and {path} has no {file.name}",
            rule="it holds the log-probabilities that the loss compares with",
            remedy=f"{remedy}, or set preference.reference=base for adapters",
        )
        raise ConfigError(fault)
    with np.load(file) as found:
        how = json.loads(str(found["how"]))
        log_probs: Floats = found["log_probs"]
    # refuse a reference of answers that were cut or counted in another way
    for name, value in wanted.items():
        if how.get(name) != value:
            fault = Fault(
                fact=f"preference.reference=stored with {name}={value}",
                rule=f"{file} has the answers as {name}={how.get(name)} cuts and counts them",
                remedy=remedy,
            )
            raise ConfigError(fault)
    # answers of another dataset would be compared with these, pair by pair
    if how.get(CONTENT) != content:
        fault = Fault(
            fact=f"preference.reference=stored, and the {split} split of {path} has content {content}",
            rule=f"{file} has the answers of content {how.get(CONTENT, 'unknown')}",
            remedy=remedy,
        )
        raise ConfigError(fault)
    return log_probs
