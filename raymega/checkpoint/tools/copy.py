"""Copies a checkpoint from any store to any other: verified on the way, the manifest last.

An interrupted copy resumes: files that are in the target already are verified and kept. Memory: one box
for each file in flight, and the buffers of the target store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raymega.box import SavedBox
from raymega.checkpoint.format.data_file import read_block, read_header
from raymega.checkpoint.format.epochs import is_valid_epoch, newest_grant
from raymega.checkpoint.format.manifest import Manifest, broken_files, commit
from raymega.checkpoint.format.manifest_builder import coverage_faults
from raymega.errors import CheckpointError, Fault, raise_faults
from raymega.storage.store import Store

FILES_IN_FLIGHT = 4
"""Number of files that are copied at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """Result of a copy.

    Attributes:
        key: Key of the manifest in the target.
        num_bytes: Size of all tensors in bytes.
        num_written: Number of files written.
        num_found: Number of files that were intact in the target already.
    """

    key: str
    num_bytes: int
    num_written: int
    num_found: int


def copy_checkpoint(source: Store, manifest: Manifest, target: Store) -> Copied:
    """Copy ``manifest`` and all its files from ``source`` to ``target``.

    Raises:
        CheckpointError: The source is not whole, or the target has another manifest with that key or
            would not accept this one.
        StorageError: A store failed; the same call again resumes the copy.
    """
    # Refuse what readers of the target would ignore or could not load.
    raise_faults(CheckpointError, [*coverage_faults(manifest), *_left_behind(manifest, target)])
    # Boxes of each file in order, and the files that the target has with the right size.
    by_file: dict[str, list[SavedBox]] = {}
    for box in sorted(manifest.boxes, key=lambda box: box.start):
        by_file.setdefault(manifest.file_key(box), []).append(box)
    present = by_file.keys() - broken_files(target, manifest).keys()

    def bring(key: str) -> bool:
        if key in present and _is_right(target, manifest, by_file[key]):
            return False
        target.put(key, _bytes_of(source, manifest, key, by_file[key]), overwrite=True)
        return True

    with ThreadPoolExecutor(FILES_IN_FLIGHT, thread_name_prefix="copy") as pool:
        written = list(pool.map(bring, by_file))
    # Every file is there: the manifest makes the copy a checkpoint.
    return Copied(
        key=commit(target, manifest),
        num_bytes=manifest.total_bytes,
        num_written=sum(written),
        num_found=len(written) - sum(written),
    )


def _left_behind(manifest: Manifest, target: Store) -> Iterator[Fault]:
    """Return the fault of a target whose newest epoch does not accept this checkpoint."""
    grant = newest_grant(target)
    if grant is not None and not is_valid_epoch(grant, manifest.key):
        yield Fault(
            fact=f"{manifest.key} is not among the checkpoints of the run in {target.uri!r}, which is "
            f"at attempt {grant.epoch}",
            rule="a run does not count what comes from older attempts behind its back",
            remedy="copy it to a folder of its own, and start another run there or from it",
        )


def _bytes_of(
    store: Store, manifest: Manifest, key: str, boxes: Sequence[SavedBox]
) -> Iterator[bytes]:
    """Yield the bytes of a file from the first on; a box with a wrong checksum raises."""
    at = 0
    for box in boxes:
        if not at:
            yield read_header(store, manifest, key)
        elif box.start > at:  # a gap, which no build leaves
            yield store.get(key, start=at, num_bytes=box.start - at)
        yield read_block(store, manifest, box)
        at = box.start + box.num_bytes


def _is_right(store: Store, manifest: Manifest, boxes: Sequence[SavedBox]) -> bool:
    try:
        read_header(store, manifest, manifest.file_key(boxes[0]))
        for box in boxes:
            read_block(store, manifest, box)
    except CheckpointError:
        return False
    return True
