"""Copies a checkpoint from any store to any other: verified on the way, the manifest last.

What an earlier copy has left is read and kept where it is right, so that a copy that broke off goes
on. Memory is one box for each file under way, and what the target store takes for a put.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raymega.checkpoint.format.data_file import read_block
from raymega.checkpoint.format.epochs import is_valid_epoch, newest_grant
from raymega.checkpoint.format.manifest import Manifest, broken_files, commit
from raymega.checkpoint.format.manifest_builder import coverage_faults
from raymega.errors import CheckpointError, Fault, raise_faults
from raymega.messages import SavedBox
from raymega.storage.store import Store

FILES_IN_FLIGHT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """What a copy did: the new manifest's ``key``, and files written and found there already."""

    key: str
    num_bytes: int
    num_written: int
    num_found: int


def copy_checkpoint(source: Store, manifest: Manifest, target: Store) -> Copied:
    """Bring ``manifest`` and all its files from ``source`` to ``target``.

    Raises:
        CheckpointError: The source is not whole, or the target holds another checkpoint by that key.
        StorageError: A store failed; the same call again goes on from there.
    """
    raise_faults(CheckpointError, [*coverage_faults(manifest), *_left_behind(manifest, target)])
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
    return Copied(
        key=commit(target, manifest),
        num_bytes=manifest.total_bytes,
        num_written=sum(written),
        num_found=len(written) - sum(written),
    )


def _left_behind(manifest: Manifest, target: Store) -> list[Fault]:
    """The fault of a target whose run has gone on without this checkpoint."""
    grant = newest_grant(target)
    if grant is None or is_valid_epoch(grant, manifest.key):
        return []
    return [
        Fault(
            fact=f"{manifest.key} is not among the checkpoints of the run in {target.uri!r}, which is "
            f"at attempt {grant.epoch}",
            rule="a run does not count what comes from older attempts behind its back",
            remedy="copy it to a folder of its own, and start another run there or from it",
        )
    ]


def _bytes_of(
    store: Store, manifest: Manifest, key: str, boxes: Sequence[SavedBox]
) -> Iterator[bytes]:
    """The file from its first byte; boxes are verified, and one that is wrong breaks the copy off."""
    at = 0
    for box in boxes:
        if box.start > at:  # the header, which no checksum covers
            yield store.get(key, start=at, num_bytes=box.start - at)
        yield read_block(store, manifest, box)
        at = box.start + box.num_bytes


def _is_right(store: Store, manifest: Manifest, boxes: Sequence[SavedBox]) -> bool:
    try:
        for box in boxes:
            read_block(store, manifest, box)
    except CheckpointError:
        return False
    return True
