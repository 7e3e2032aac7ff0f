"""Exports a native checkpoint to a folder that torch.distributed.checkpoint loads, moments included.

The folder appears whole or not at all. Memory: one box, or a whole tensor where rows are reordered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.manifest_builder import coverage_faults
from raymega.checkpoint.load.init_from import WEIGHTS
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.schema import ModelSection
from raymega.convert.native import model_of
from raymega.convert.number_formats import Array
from raymega.convert.output_folder import folder_faults, new_folder
from raymega.convert.torch_dcp.importer import BESIDE
from raymega.convert.torch_dcp.names import (
    DIALECTS,
    STEP,
    Dialect,
    dialect_faults,
    is_reordered,
    padded_rows,
    path_of,
    reorder_rope_rows,
    state_faults,
)
from raymega.convert.torch_dcp.writer import DcpNewTensor, write_dcp
from raymega.errors import CheckpointError, ConfigError, raise_faults

COUNTED = "adam.exp_avg"
"""Kind of tensor for which torch's optimizer also keeps the number of updates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpExport:
    """Result of an export.

    Attributes:
        folder: Folder that was written.
        key: Key of the manifest that was exported.
        step: Number of completed steps of the run.
        num_parameters: Number of elements of the weights.
        files: Names of all files.
    """

    folder: Path
    key: str
    step: int
    num_parameters: int
    files: tuple[str, ...]


def dcp_export(uri: str, folder: Path, *, names: str = "raymega") -> DcpExport:
    """Convert the newest checkpoint that ``uri`` names to one of torch in ``folder``.

    Args:
        uri: URI of a run's folder, of one of its checkpoints or of a manifest.
        folder: Folder to write, which must not exist or must be empty.
        names: Key of DIALECTS: the names of tensors to write.

    Raises:
        ConfigError: The arguments are wrong; nothing was written.
        CheckpointError: The checkpoint is not whole; nothing was written.
    """
    # Check the arguments and the checkpoint.
    raise_faults(ConfigError, folder_faults(folder))
    _, manifest = checkpoint = open_checkpoint(uri)
    model = model_of(manifest) if manifest.job.get("model") else None
    kinds = {name.partition("/")[0] for name in manifest.tensors()}
    raise_faults(ConfigError, [*dialect_faults(names, model), *state_faults(kinds)])
    raise_faults(CheckpointError, coverage_faults(manifest))
    dialect = DIALECTS[names]
    # Write the tensors, then what torch has no place for.
    with new_folder(folder) as partial_folder:
        tensors = _Tensors(checkpoint, dialect, model)
        files = write_dcp(partial_folder, tensors.all())
        beside = {"version": 1, "state": manifest.state, "job": manifest.job, "grid": manifest.grid}
        (partial_folder / BESIDE).write_text(json.dumps(beside) + "\n", encoding="utf-8")
    shapes = {name: boxes[0].global_shape for name, boxes in manifest.tensors().items()}
    return DcpExport(
        folder=folder, key=manifest.key, step=manifest.step,
        num_parameters=sum(prod(shapes[at]) for at in shapes if at.startswith(f"{WEIGHTS}/")),
        files=(*files, BESIDE),
    )  # fmt: skip


class _Tensors:
    """Tensors of a checkpoint in the form in which torch loads them."""

    def __init__(
        self, checkpoint: Checkpoint, dialect: Dialect, model: ModelSection | None
    ) -> None:
        self._checkpoint, self._manifest, self._dialect = checkpoint, checkpoint.manifest, dialect
        self._head_width = model.head_width if model else 0
        self._pads: Mapping[str, int] = padded_rows(model, dialect) if model else {}

    def all(self) -> Iterator[DcpNewTensor]:
        """Yield every tensor, and the optimizer's count of updates for each weight."""
        for name, boxes in self._manifest.tensors().items():
            yield self._tensor(name, boxes)
            if name.startswith(f"{COUNTED}/"):
                yield self._count(name)

    def _tensor(self, name: str, boxes: Sequence[SavedBox]) -> DcpNewTensor:
        # Cut off padded rows, where the dialect has none.
        num_rows, *rest = boxes[0].global_shape
        real = num_rows - self._pads.get(name.partition("/")[2], 0)
        whole = Box.whole((real, *rest))
        blocks: list[tuple[Box, Callable[[], Array]]] = []
        # Rows are reordered in the whole tensor; other tensors are copied box by box.
        if is_reordered(name, self._dialect):
            blocks.append((whole, partial(self._turned, boxes)))
        else:
            for saved in boxes:
                box = saved.box.intersect(whole)
                if box is not None:
                    blocks.append((box, partial(self._part, saved, box)))
        path = path_of(name, self._dialect)
        return DcpNewTensor(
            path=path, dtype=boxes[0].dtype, shape=whole.shape, blocks=tuple(blocks)
        )

    def _part(self, saved: SavedBox, box: Box) -> Array:
        return self._checkpoint.read_bits(saved)[box.within(saved.box)]

    def _turned(self, boxes: Sequence[SavedBox]) -> Array:
        values = self._checkpoint.read_bits_of(boxes)
        return reorder_rope_rows(values, self._head_width, to_ours=False)

    def _count(self, name: str) -> DcpNewTensor:
        """Return the count of updates beside a tensor's first moment, a float32 as torch has it."""
        state = self._manifest.state
        # A step that was skipped (a bad batch) made no update.
        count = np.float32(int(state["step"]) - int(state.get("skipped_steps", 0)))
        *above, _ = path_of(name, self._dialect)
        box = Box.whole(())
        return DcpNewTensor(
            path=(*above, STEP), dtype="float32", shape=(), blocks=((box, lambda: np.array(count)),)
        )
