"""Writes native checkpoints without a run, from tensors of any source.

``raymega/checkpoint/format`` defines the format. Memory: one block at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
from isal.isal_zlib import crc32
from pydantic import ValidationError

from raymega.box import SavedBox
from raymega.checkpoint.format.data_file import (
    LocalBlock,
    WriteAssignment,
    file_header,
    layout_file,
    saved_boxes,
    share_boxes,
)
from raymega.checkpoint.format.keys import (
    CheckpointId,
    data_file,
    entry_key,
    folder_of,
    index_prefix,
    manifest_key,
)
from raymega.checkpoint.format.manifest import Manifest, commit, list_manifests
from raymega.checkpoint.load.init_from import WEIGHTS
from raymega.config.schema import ModelSection
from raymega.convert.number_formats import Array
from raymega.errors import CheckpointError, Fault
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plugins import is_known, use_for_checkpoint
from raymega.storage.store import Store

ATTEMPT = 0
"""Number of the attempt in a converted checkpoint; attempts of runs count from 1."""
FILE_BYTES = 2 * 2**30
"""Size in bytes from which on the next block goes to a new data file."""

State = dict[str, int | float | str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource(LocalBlock):
    """A block that is to be written; ``read``, called once, returns the values, [*box.shape]."""

    read: Callable[[], Array]


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Fields of a manifest beside its tensors.

    Attributes:
        state: Scalars of the trainer.
        job: Values of the job, as far as they are known.
        created: Time of the conversion: ISO 8601, UTC.
        grid: Degrees of the axes of the grid that trained the weights; empty when unknown.
    """

    state: State
    job: Mapping[str, object]
    created: str
    grid: Mapping[str, object]

    @property
    def at(self) -> CheckpointId:
        """Identity of the checkpoint: its attempt and step."""
        return CheckpointId(attempt=ATTEMPT, step=int(self.state["step"]))


def write_weights(
    store: Store,
    tensors: Sequence[GlobalTensor],
    values: Callable[[GlobalTensor], Array],
    *,
    dtype: str,
    job: Mapping[str, object],
    created: str,
) -> str:
    """Write a checkpoint of weights alone, before any step, and return its manifest's key.

    Args:
        store: Store to write to, laid out as a run's.
        tensors: Tensors of the model, all of them.
        values: Function that returns the values of a tensor; called once each, in that order.
        dtype: Element type of all tensors.
        job: Values of the job, as far as they are known, for the manifest.
        created: Time of the conversion: ISO 8601, UTC.
    """
    sources = [
        TensorSource(
            tensor=f"{WEIGHTS}/{tensor.name}", dtype=dtype, global_shape=tensor.shape,
            box=tensor.whole, read=partial(values, tensor),
        )
        for tensor in tensors
    ]  # fmt: skip
    state: State = {"step": 0, "samples": 0, "tokens": 0}
    return write_checkpoint(store, sources, Header(state=state, job=job, created=created, grid={}))


def write_checkpoint(store: Store, sources: Sequence[TensorSource], header: Header) -> str:
    """Write a checkpoint of ``sources``, which tile their tensors, and return its manifest's key.

    When something fails, what was written is removed.
    """
    boxes: list[SavedBox] = []
    headers: dict[str, int] = {}
    written: list[str] = []
    try:
        # Data files, then the manifest. Each file has the name that a rank's would have.
        for number, batch in enumerate(_files(sources)):
            file = data_file(attempt=ATTEMPT, rank=number)
            written.append(folder_of(header.at.step) + file)
            headers[file] = _write_file(store, written[-1], batch, header.at, boxes)
        manifest = Manifest(
            step=header.at.step, attempt=ATTEMPT, created=header.created, state=header.state,
            job=dict(header.job), grid=dict(header.grid), boxes=tuple(boxes),
            headers=headers,
        )  # fmt: skip
        return commit(store, manifest)
    except BaseException:
        # The entry and the manifest first: no reader may find one without its files.
        for key in (entry_key(header.at), manifest_key(header.at), *written):
            store.delete(key)
        for key in [*store.list(folder_of(header.at.step) + index_prefix(header.at))]:
            store.delete(key)
        raise


def occupied_faults(store: Store) -> Iterator[Fault]:
    """Return the fault of a ``store`` that holds checkpoints already."""
    manifests = list_manifests(store)
    if manifests:
        yield Fault(
            fact=f"--out {store.uri!r} holds {manifests[0]}",
            rule="converted weights go where no checkpoint is",
            remedy="give a new folder",
        )


def model_of(manifest: Manifest) -> ModelSection:
    """Return the model section recorded in a manifest of a whole model.

    Raises:
        CheckpointError: The manifest has no model section that this build can read, or holds adapters alone.
    """
    model = tuned_model_of(manifest)
    if model.lora.r:
        raise CheckpointError(
            fact=f"{manifest.key} holds LoRA adapters of rank {model.lora.r}, without the weights that they change",
            rule="a model is used or exported with its adapters merged",
            remedy="use the result of: raymega checkpoint merge URI --out MERGED",
        )
    return model


def tuned_model_of(manifest: Manifest) -> ModelSection:
    """Return the model section recorded in a manifest, with adapters or without.

    Raises:
        CheckpointError: The manifest has no model section that this build can read.
        ConfigError: The family is of a plug-in that is not installed.
    """
    try:
        # As JSON, whose lists are tuples here.
        model = ModelSection.model_validate_json(json.dumps(manifest.job.get("model")))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, ("model", *first["loc"][:1])))
        raise CheckpointError(
            fact=f"{manifest.key} has a model section that this build cannot read: {field}: {first['msg']}",
            rule="a checkpoint is exported by the model section that it carries",
            remedy="use the raymega that wrote it",
        ) from error
    if not is_known("family", model.family):
        use_for_checkpoint(modules_of(manifest))
    return model


def modules_of(manifest: Manifest) -> tuple[str, ...]:
    """Return the modules of plug-ins that a manifest names; none where the field is of another form."""
    section = manifest.job.get("plugins")
    modules = section.get("modules") if isinstance(section, Mapping) else None
    return tuple(filter(_is_text, modules)) if isinstance(modules, list) else ()


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _files(sources: Sequence[TensorSource]) -> Iterator[list[TensorSource]]:
    """Group blocks into data files; a file ends with the block that brings it to FILE_BYTES."""
    size = 0
    batch: list[TensorSource] = []
    for source in sources:
        batch.append(source)
        size += source.num_bytes
        if size >= FILE_BYTES:
            yield batch
            size, batch = 0, []
    if batch:
        yield batch


def _write_file(
    store: Store, key: str, sources: Sequence[TensorSource], at: CheckpointId, boxes: list[SavedBox]
) -> int:
    """Write a data file, append its boxes to ``boxes``, and return the crc32 of its header."""
    # One holder: share_boxes only cuts blocks into boxes of bounded size.
    layout, checksums = layout_file(share_boxes(sources)), list[int]()
    header = file_header(layout, {"step": str(at.step), "attempt": str(at.attempt)})
    # _chunks fills the checksums while the store takes the bytes.
    store.put(key, chain([header], _chunks(layout, sources, checksums)), overwrite=True)
    file = key.rpartition("/")[2]
    boxes += saved_boxes(layout, checksums, file=file, header_bytes=len(header))
    return crc32(header)


def _chunks(
    layout: Sequence[WriteAssignment], sources: Sequence[TensorSource], checksums: list[int]
) -> Iterator[memoryview]:
    """Yield the bytes of each block, and append its crc32 to ``checksums``."""
    held, values = -1, np.empty(0)
    for assignment in layout:
        source = sources[assignment.local_block]
        # Boxes of one source follow one another, so each source is read once.
        if assignment.local_block != held:
            held, values = assignment.local_block, np.ascontiguousarray(source.read())
            assert values.shape == source.box.shape, f"{source.tensor} came as {values.shape}"
        part = values[assignment.box.within(source.box)]
        block = part.reshape(-1).view(np.uint8).data
        checksums.append(crc32(block))
        yield block
