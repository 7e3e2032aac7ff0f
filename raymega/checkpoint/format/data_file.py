"""Layout of a rank's data file, and reading and verifying one of its blocks.

The format is safetensors, so that other tools can open the parts of a checkpoint: 8 bytes of header
length, a JSON header, then the blocks' bytes end to end, little-endian. Reading uses only the byte
ranges and checksums of the manifest, never the JSON header, which has a checksum there too.
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
from raymega.errors import CheckpointError
from raymega.messages import SavedBox
from raymega.storage.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """Byte range of each block in a data file.

    Attributes:
        assignments: Blocks in the order of the file.
        starts: First byte of each block, counted from the header's end.
        num_bytes: Length of all blocks together.
    """

    assignments: tuple[WriteAssignment, ...]
    starts: tuple[int, ...]
    num_bytes: int

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """Return the file's header, with ``metadata`` under ``__metadata__`` for other readers."""
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        for assignment, start in zip(self.assignments, self.starts, strict=True):
            entries[_entry_name(assignment)] = {
                "dtype": element_type(assignment.dtype).safetensors_code,
                "shape": assignment.box.shape,
                "data_offsets": (start, start + assignment.num_bytes),
            }
        return safetensors_header(entries)


def layout_file(assignments: Iterable[WriteAssignment]) -> FileLayout:
    """Lay out blocks end to end, each aligned to a multiple of its element's bytes."""
    # Widest element type first: element sizes are powers of two, so no padding is needed.
    ordered = sorted(assignments, key=lambda assignment: -element_type(assignment.dtype).num_bytes)
    *starts, end = accumulate((assignment.num_bytes for assignment in ordered), initial=0)
    return FileLayout(assignments=tuple(ordered), starts=tuple(starts), num_bytes=end)


def saved_boxes(
    layout: FileLayout, checksums: Iterable[int], *, file: str, header_bytes: int
) -> tuple[SavedBox, ...]:
    """Return the manifest's entries for the blocks of ``layout``, whose crc32 are ``checksums``."""
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
    """Read the bytes of one box and verify their length and checksum.

    Raises:
        CheckpointError: The bytes are missing, or differ from those that were written.
    """
    key = manifest.file_key(saved)
    try:
        data = store.get(key, start=saved.start, num_bytes=saved.num_bytes)
    except KeyError:
        raise missing_file(key, saved) from None
    check_block(key, saved, num_bytes=len(data), checksum=crc32(data))
    return data


def read_header(store: Store, manifest: Manifest, key: str) -> bytes:
    """Read the header of the data file ``key``, and verify it where the manifest has its checksum.

    Raises:
        CheckpointError: The bytes differ from those that were written.
    """
    num_bytes = manifest.header_sizes()[key]
    header = store.get(key, num_bytes=num_bytes)
    wanted = manifest.headers.get(key.rpartition("/")[2])
    if wanted is not None and crc32(header) != wanted:
        raise _changed(
            f"{key}, bytes 0 to {num_bytes} (its header)",
            f"their crc32 is {crc32(header):08x}, not {wanted:08x}",
        )
    return header


def check_block(key: str, saved: SavedBox, *, num_bytes: int, checksum: int) -> None:
    """Compare length and crc32 of a box read from the file ``key`` with the manifest's.

    Raises:
        CheckpointError: One of the two differs.
    """
    if num_bytes != saved.num_bytes:
        raise _corrupt(key, saved, f"only {num_bytes} bytes are there")
    if checksum != saved.crc32:
        raise _corrupt(key, saved, f"their crc32 is {checksum:08x}, not {saved.crc32:08x}")


def missing_file(key: str, saved: SavedBox) -> CheckpointError:
    """Return the error for a missing file that should hold the box ``saved``."""
    return _corrupt(key, saved, "the file is missing")


def safetensors_header(entries: Mapping[str, object]) -> bytes:
    """Return the header of a safetensors file: its length in 8 bytes, then ``entries`` as JSON."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    # safetensors lets spaces follow the JSON; with them the data begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _entry_name(assignment: WriteAssignment) -> str:
    """Return tensor and first index of a block, ``model/layers.0.attention.q.weight@128,0``."""
    return f"{assignment.tensor}@{','.join(map(str, assignment.box.offset))}"


def _corrupt(key: str, saved: SavedBox, fact: str) -> CheckpointError:
    end = saved.start + saved.num_bytes
    return _changed(f"{key}, bytes {saved.start} to {end} ({saved.tensor})", fact)


def _changed(place: str, fact: str) -> CheckpointError:
    return CheckpointError(
        fact=f"{place}: {fact}",
        rule="every block must be as it was written",
        remedy="restore from an older checkpoint; raymega checkpoint list shows them",
    )
