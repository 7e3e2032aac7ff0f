"""Native checkpoints from the outside: written without a run.

The pieces of the format are the checkpoint package's. It holds one block in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
from isal.isal_zlib import crc32
from pydantic import ValidationError

from raymega.checkpoint.format.data_file import FileLayout, layout_file, saved_boxes
from raymega.checkpoint.format.dtypes import element_type
from raymega.checkpoint.format.keys import CheckpointId, data_file, folder_of, manifest_key
from raymega.checkpoint.format.manifest import Manifest, commit, list_manifests
from raymega.checkpoint.format.write_plan import LocalBlock, share_boxes
from raymega.checkpoint.load.init_from import WEIGHTS
from raymega.config.schema import ModelSection
from raymega.convert.number_formats import Array
from raymega.errors import CheckpointError, Fault
from raymega.messages import Box, SavedBox
from raymega.plan.tensor_table import GlobalTensor
from raymega.storage.store import Store

ATTEMPT = 0
"""No worker group writes it."""
FILE_BYTES = 2 * 2**30

State = dict[str, int | float | str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """A block of a tensor that is to be written.

    Attributes:
        tensor: Saved name, ``kind/name``.
        dtype: Element type.
        global_shape: Shape of the whole tensor.
        box: Which block of it.
        read: Gives the values, [*box.shape]; called once.
    """

    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    read: Callable[[], Array]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.box.num_elements * element_type(self.dtype).num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a checkpoint says of itself beside its tensors.

    Attributes:
        state: The trainer's scalars.
        job: What is known of a job.
        created: When: ISO 8601, UTC.
        grid: Degrees of the axes that it was made on; nothing when there were none.
    """

    state: State
    job: Mapping[str, object]
    created: str
    grid: Mapping[str, object]

    @property
    def at(self) -> CheckpointId:
        """Which checkpoint of a run it is."""
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
        store: Where a run would lie.
        tensors: Every tensor of the model.
        values: Gives the values of one of them; called once each, in that order.
        dtype: Their format.
        job: What is known of a job, for the manifest.
        created: When: ISO 8601, UTC.
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
    written: list[str] = []
    try:
        for number, batch in enumerate(_files(sources)):
            file = data_file(attempt=ATTEMPT, rank=number)
            written.append(folder_of(header.at.step) + file)
            boxes += _write_file(store, written[-1], batch, header.at)
        manifest = Manifest(
            step=header.at.step, attempt=ATTEMPT, created=header.created, state=header.state,
            job=dict(header.job), grid=dict(header.grid), boxes=tuple(boxes),
        )  # fmt: skip
        return commit(store, manifest)
    except BaseException:
        for key in (manifest_key(header.at), *written):
            store.delete(key)
        raise


def occupied_faults(store: Store) -> list[Fault]:
    """What keeps converted weights from being written to ``store``."""
    manifests = list_manifests(store)
    if not manifests:
        return []
    return [
        Fault(
            fact=f"--out {store.uri!r} holds {manifests[0]}",
            rule="converted weights go where no checkpoint is",
            remedy="give a new folder",
        )
    ]


def model_of(manifest: Manifest) -> ModelSection:
    """The model section that a checkpoint carries.

    Raises:
        CheckpointError: It has none that this build can read.
    """
    try:
        return ModelSection.model_validate(manifest.job.get("model"))
    except ValidationError as error:
        fault = Fault(
            fact=f"{manifest.key} has a model section that this build cannot read: "
            f"{error.errors()[0]['loc']}, {error.errors()[0]['msg']}",
            rule="a checkpoint is exported by the model section that it carries",
            remedy="use the raymega that wrote it",
        )
        raise CheckpointError(fault) from error


def _files(sources: Sequence[TensorSource]) -> Iterator[list[TensorSource]]:
    """Blocks of one data file each: until one has FILE_BYTES or more."""
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
    store: Store, key: str, sources: Sequence[TensorSource], at: CheckpointId
) -> tuple[SavedBox, ...]:
    blocks = [
        LocalBlock(
            tensor=source.tensor, dtype=source.dtype, global_shape=source.global_shape, box=source.box,
            is_primary=True,
        )
        for source in sources
    ]  # fmt: skip
    layout, checksums = layout_file(share_boxes(blocks)), list[int]()
    header = layout.header({"step": str(at.step), "attempt": str(at.attempt)})
    store.put(key, chain([header], _chunks(layout, sources, checksums)), overwrite=True)
    file = key.rpartition("/")[2]
    return saved_boxes(layout, checksums, file=file, header_bytes=len(header))


def _chunks(
    layout: FileLayout, sources: Sequence[TensorSource], checksums: list[int]
) -> Iterator[memoryview]:
    """The blocks' bytes, and meanwhile the checksum of each; a source's blocks are together."""
    held, values = -1, np.empty(0)
    for assignment in layout.assignments:
        source = sources[assignment.local_block]
        if assignment.local_block != held:
            held, values = assignment.local_block, np.ascontiguousarray(source.read())
            assert values.shape == source.box.shape, f"{source.tensor} came as {values.shape}"
        part = values[assignment.box.within(source.box)]
        block = part.reshape(-1).view(np.uint8).data
        checksums.append(crc32(block))
        yield block
