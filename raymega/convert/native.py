"""Native checkpoints from the outside: weights written without a run, and read tensor by tensor.

The pieces of the format are the checkpoint package's. It holds one tensor in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from zlib import crc32

import numpy as np

from raymega.checkpoint.data_file import Layout, lay_out, read_block, saved_boxes
from raymega.checkpoint.dtypes import element_type
from raymega.checkpoint.keys import CheckpointId, data_file, folder_of, manifest_key
from raymega.checkpoint.manifest import Manifest, commit
from raymega.checkpoint.planner import MAX_BOX_BYTES, Share
from raymega.checkpoint.start import WEIGHTS
from raymega.convert.number_formats import Array, storage_type
from raymega.messages import Box, SavedBox
from raymega.plan.tensors import GlobalTensor
from raymega.storage.store import Store

AT = CheckpointId(attempt=0, step=0)
"""No worker group writes it and no step was taken."""
FILE_BYTES = 2 * 2**30


def write_weights(
    store: Store,
    tensors: Sequence[GlobalTensor],
    values: Callable[[GlobalTensor], Array],
    *,
    dtype: str,
    job: Mapping[str, object],
    created: str,
) -> str:
    """Write a checkpoint of weights alone and return its manifest's key.

    Args:
        store: Where a run would lie.
        tensors: Every tensor of the model.
        values: Gives the values of one of them; called once each, in that order.
        dtype: Their format.
        job: What is known of a job, for the manifest.
        created: When: ISO 8601, UTC.
    """
    boxes: list[SavedBox] = []
    written: list[str] = []
    try:
        for number, batch in enumerate(_files(tensors, dtype)):
            file = data_file(attempt=AT.attempt, rank=number)
            written.append(folder_of(AT.step) + file)
            boxes += _write_file(store, file, batch, values, dtype)
        state: dict[str, int | float | str] = {"step": 0, "samples": 0, "tokens": 0}
        manifest = Manifest(
            step=AT.step, attempt=AT.attempt, created=created, state=state, job=dict(job), grid={},
            boxes=tuple(boxes),
        )  # fmt: skip
        return commit(store, manifest)
    except BaseException:
        for key in (manifest_key(AT), *written):
            store.delete(key)
        raise


def read_tensor(store: Store, manifest: Manifest, boxes: Sequence[SavedBox]) -> Array:
    """The whole tensor that ``boxes`` tile, each verified.

    Raises:
        CheckpointError: A box is missing or not as it was written.
    """
    values = np.empty(boxes[0].global_shape, storage_type(boxes[0].dtype))
    whole = Box(offset=(0,) * values.ndim, shape=values.shape)
    for saved in boxes:
        block = np.frombuffer(read_block(store, manifest, saved), storage_type(saved.dtype))
        values[saved.box.within(whole)] = block.reshape(saved.box.shape)
    return values


def _files(tensors: Sequence[GlobalTensor], dtype: str) -> Iterator[list[GlobalTensor]]:
    """Tensors of one data file each: until one has FILE_BYTES or more."""
    size, batch = 0, []
    for tensor in tensors:
        batch.append(tensor)
        size += tensor.num_elements * element_type(dtype).num_bytes
        if size >= FILE_BYTES:
            yield batch
            size, batch = 0, []
    if batch:
        yield batch


def _write_file(
    store: Store,
    file: str,
    tensors: Sequence[GlobalTensor],
    values: Callable[[GlobalTensor], Array],
    dtype: str,
) -> tuple[SavedBox, ...]:
    shares = [share for tensor in tensors for share in _shares(tensor, dtype)]
    layout = lay_out(shares, metadata={"step": str(AT.step), "attempt": str(AT.attempt)})
    assert layout.shares == tuple(shares), "of one format, blocks keep their order"
    checksums: list[int] = []
    chunks = _chunks(layout, tensors, values, checksums)
    store.put(folder_of(AT.step) + file, chunks, overwrite=True)
    return saved_boxes(layout, checksums, file)


def _shares(tensor: GlobalTensor, dtype: str) -> Iterator[Share]:
    """The tensor in blocks of rows of bounded size."""
    num_rows, *rest = tensor.shape
    row_bytes = tensor.num_elements // num_rows * element_type(dtype).num_bytes
    step = max(1, MAX_BOX_BYTES // row_bytes)
    for row in range(0, num_rows, step):
        box = Box(offset=(row, *([0] * len(rest))), shape=(min(step, num_rows - row), *rest))
        yield Share(
            holding=0, tensor=f"{WEIGHTS}/{tensor.name}", dtype=dtype, global_shape=tensor.shape,
            box=box,
        )  # fmt: skip


def _chunks(
    layout: Layout,
    tensors: Sequence[GlobalTensor],
    values: Callable[[GlobalTensor], Array],
    checksums: list[int],
) -> Iterator[bytes | memoryview]:
    """The file's bytes, and meanwhile the checksum of each block."""
    yield layout.header
    shares = iter(layout.shares)
    for tensor in tensors:
        array = np.ascontiguousarray(values(tensor))
        row = 0
        while row < tensor.shape[0]:
            share = next(shares)
            rows = array[row : row + share.box.shape[0]]
            block = rows.reshape(-1).view(np.uint8).data
            checksums.append(crc32(block))
            yield block
            row += share.box.shape[0]
