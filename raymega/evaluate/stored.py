"""Checks of a model whose outputs are stored beside a job's datasets: its checkpoint, its grid, and room for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raymega.checkpoint.tools.handle import Checkpoint
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.grid_text import grid_overrides
from raymega.data.preference.dataset_folder import has_folder, no_folder
from raymega.errors import ConfigError, Fault, RaymegaError, raise_faults


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Texts by which a fault speaks of the model and of what is stored.

    Attributes:
        field: Field of the job that names the checkpoint.
        model: Sentence that says what the model is.
        stored: Sentence that says what is written, up to "beside the shards".
        other: Setting that needs no stored file.
    """

    field: str
    model: str
    stored: str
    other: str


def opened_model(
    uri: str, grid: str, datasets: Sequence[str], kept: Kept, faults: Iterable[Fault]
) -> Checkpoint:
    """Return the checkpoint whose outputs are stored, once all that can be known beforehand is right.

    Args:
        uri: URI of the checkpoint; ``none`` where neither the job nor an option names one.
        grid: Degrees of its grid, such as ``tp=2``.
        datasets: Paths of the datasets beside which its outputs are written.
        kept: Texts of the faults.
        faults: Faults of the job that are known already.

    Raises:
        ConfigError: One of these is wrong; the error names all that are.
    """
    found = list(faults)
    if uri == "none":
        found.append(
            Fault(
                fact=f"{kept.field}=none, and no --checkpoint",
                rule=kept.model,
                remedy=f"set {kept.field}, or give --checkpoint URI",
            )
        )
    opened = None
    try:
        grid_overrides(grid)
    except ConfigError as error:
        found += error.faults
    try:
        opened = open_checkpoint(uri) if uri != "none" else None
    except RaymegaError as error:
        found += error.faults
    found += [
        no_folder("", path, stored=kept.stored, other=kept.other)
        for path in datasets
        if not has_folder(path)
    ]
    raise_faults(ConfigError, found)
    assert opened is not None, "a checkpoint that is not opened is a fault"
    return opened
