"""A rank's data file: how its blocks are laid out, and how one is read back and verified.

The format is safetensors, so that other tools can open the parts of a checkpoint: 8 bytes of header
length, a JSON header, then the blocks' bytes end to end, little-endian. Reading goes by the
manifest's byte ranges and checksums alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from isal.isal_zlib import crc32

from raymega.checkpoint.format.dtypes import element_type
from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.format.write_plan import WriteAssignment
from raymega.errors import CheckpointError, Fault
from raymega.messages import SavedBox
from raymega.storage.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """Where each block lies.

    Attributes:
        assignments: The blocks in the order of the file.
        starts: First byte of each block, counted from the header's end.
        num_bytes: Length of all blocks together.
    """

    assignments: tuple[WriteAssignment, ...]
    starts: tuple[int, ...]
    num_bytes: int

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """The file's first bytes; ``metadata`` stands in them for whoever opens it."""
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        for assignment, start in zip(self.assignments, self.starts, strict=True):
            entries[_entry_name(assignment)] = {
                "dtype": element_type(assignment.dtype).safetensors_code,
                "shape": assignment.box.shape,
                "data_offsets": (start, start + assignment.num_bytes),
            }
        return safetensors_header(entries)


def layout_file(assignments: Iterable[WriteAssignment]) -> FileLayout:
    """Put the widest element types first, so that every block begins at a multiple of its own."""
    ordered = sorted(assignments, key=lambda assignment: -element_type(assignment.dtype).num_bytes)
    *starts, end = accumulate((assignment.num_bytes for assignment in ordered), initial=0)
    return FileLayout(assignments=tuple(ordered), starts=tuple(starts), num_bytes=end)


def saved_boxes(
    layout: FileLayout, checksums: Iterable[int], *, file: str, header_bytes: int
) -> tuple[SavedBox, ...]:
    """The manifest's entries for ``layout``'s shares; ``checksums`` are their crc32, in order."""
    entries = zip(layout.assignments, layout.starts, checksums, strict=True)
    return tuple(
        SavedBox(
            tensor=assignment.tensor, dtype=assignment.dtype, global_shape=assignment.global_shape, box=assignment.box,
            file=file, start=header_bytes + start, num_bytes=assignment.num_bytes,
            crc32=checksum,
        )
        for assignment, start, checksum in entries
    )  # fmt: skip


def read_block(store: Store, manifest: Manifest, saved: SavedBox) -> bytes:
    """The bytes of one box.

    Raises:
        CheckpointError: They are missing or not the bytes that were written.
    """
    key = manifest.file_key(saved)
    try:
        data = store.get(key, start=saved.start, num_bytes=saved.num_bytes)
    except KeyError:
        raise missing_file(key, saved) from None
    check_block(key, saved, num_bytes=len(data), checksum=crc32(data))
    return data


def check_block(key: str, saved: SavedBox, *, num_bytes: int, checksum: int) -> None:
    """Hold what was read from the file ``key`` as the bytes of a box against what was written.

    Raises:
        CheckpointError: They differ.
    """
    if num_bytes != saved.num_bytes:
        raise _corrupt(key, saved, f"only {num_bytes} bytes are there")
    if checksum != saved.crc32:
        raise _corrupt(key, saved, f"their crc32 is {checksum:08x}, not {saved.crc32:08x}")


def missing_file(key: str, saved: SavedBox) -> CheckpointError:
    """The error of a file that is not there when ``saved`` is wanted."""
    return _corrupt(key, saved, "the file is missing")


def safetensors_header(entries: Mapping[str, object]) -> bytes:
    """The begin of a safetensors file: the header's length, and ``entries`` padded to 8 bytes."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _entry_name(assignment: WriteAssignment) -> str:
    """Such as ``model/layers.0.attention.q.weight@128,0``: the tensor and the block's first index."""
    return f"{assignment.tensor}@{','.join(map(str, assignment.box.offset))}"


def _corrupt(key: str, saved: SavedBox, fact: str) -> CheckpointError:
    end = saved.start + saved.num_bytes
    return CheckpointError(
        Fault(
            fact=f"{key}, bytes {saved.start} to {end} ({saved.tensor}): {fact}",
            rule="every block must be as it was written",
            remedy="restore from an older checkpoint; raymega checkpoint list shows them",
        )
    )
