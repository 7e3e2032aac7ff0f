"""Joins what the groups wrote to the shards of the dataset.

It owns the borders of shards: they depend on the documents and their order alone, not on how files
were compressed, cut and grouped. So every form of one corpus gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np

from raymega.data.arrow import ShardWriter, file_crc32, shard_documents
from raymega.data.format import LENGTHS_DTYPE, SHARD_TOKENS, ImageMeta, ShardMeta
from raymega.errors import DataError, Fault
from raymega.prepare.images.rows import IMAGES_FORMAT
from raymega.prepare.origins import ORIGINS_SUFFIX as FINAL_SUFFIX
from raymega.prepare.origins import encode_origins
from raymega.prepare.readers.pieces import ShardGroup
from raymega.prepare.shards import ORIGINS_SUFFIX, GroupDone


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPart:
    """Tokens that one group wrote for one split.

    Attributes:
        start: Position of its first token in the split's stream.
        shard: Description of its file below ``_state``.
        pieces: Source number and first row in that source, for each piece of the group.
    """

    start: int
    shard: ShardMeta
    pieces: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """Shard to be joined: the documents that begin at tokens [start, stop) of the split's stream."""

    file: str
    start: int
    stop: int
    parts: tuple[GroupPart, ...]
    has_targets: bool = False
    has_images: bool = False


def plan_shards(
    groups: Sequence[ShardGroup], reports: Sequence[GroupDone], images: ImageMeta | None = None
) -> list[ShardPlan]:
    """Return the shards of all splits.

    Args:
        groups: Groups of the corpus, in order.
        reports: Report of each group, in the same order.
        images: Form of the images of rows; None without any.
    """
    # with pixels a shard is as large as one of tokens, not a hundred times that: a node fetches whole ones
    size = SHARD_TOKENS if images is None else max(1, SHARD_TOKENS // images.tokens_worth)
    pieces = list(_origins(groups, reports))
    plans, has_targets = [], any(group.row_format != "text" for group in groups)
    for split in sorted({name for report in reports for name in report.parts}):
        parts, at = [], 0
        for report, origins in zip(reports, pieces, strict=True):
            if split in report.parts:
                shard = report.parts[split].shard
                parts.append(GroupPart(start=at, shard=shard, pieces=origins))
                at += shard.num_tokens
        plans += list(_plan_split(split, parts, at, size))
    has_images = any(group.row_format == IMAGES_FORMAT for group in groups)
    return [replace(plan, has_targets=has_targets, has_images=has_images) for plan in plans]


def write_shard(
    plan: ShardPlan, *, state: Path, folder: Path, dtype: str
) -> tuple[ShardMeta, bytes] | None:
    """Write a shard and the origins of its documents; None if no document begins in its range.

    Args:
        plan: Shard to write.
        state: Folder with the files of the groups.
        folder: Folder of the new files.
        dtype: Element type of the tokens.

    Returns:
        Description of the shard, and the lengths of its documents as a file of lengths has them.

    Raises:
        DataError: A file of a group is damaged.
    """
    found, lengths = list[tuple[int, int]](), list[int]()
    kinds = {"has_targets": plan.has_targets, "has_images": plan.has_images}
    with ShardWriter(folder, plan.file, dtype=dtype, **kinds) as writer:
        for part in plan.parts:
            path = state / part.shard.file
            if file_crc32(path) != part.shard.crc32:
                raise DataError(_damaged(path))
            rows = np.load(path.with_suffix(ORIGINS_SUFFIX))
            at = part.start
            for document, (piece, row) in zip(shard_documents(path), rows, strict=True):
                if plan.start <= at < plan.stop:
                    source, first = part.pieces[piece]
                    writer.append(*document)
                    found.append((source, first + int(row)))
                    lengths.append(len(document[0]))
                at += len(document[0])
        meta = writer.close()
    if not found:
        (folder / plan.file).unlink()
        return None
    origins = (folder / plan.file).with_suffix(FINAL_SUFFIX)
    origins.write_bytes(encode_origins(np.array(found)))
    return meta, np.array(lengths, dtype=LENGTHS_DTYPE).tobytes()


def source_labels(groups: Sequence[ShardGroup]) -> list[str]:
    """Return the labels of the files by source number."""
    files = (piece.file for group in groups for piece in group.pieces)
    return [file.label for file, _ in groupby(files)]


def _origins(
    groups: Sequence[ShardGroup], reports: Sequence[GroupDone]
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield for each group the source number and first row of its pieces."""
    source, last, row = -1, None, 0
    for group, report in zip(groups, reports, strict=True):
        pieces = []
        for piece, num_rows in zip(group.pieces, report.num_rows, strict=True):
            # Pieces of a file follow each other.
            if piece.file != last:
                source, last, row = source + 1, piece.file, 0
            pieces.append((source, row))
            row += num_rows
        yield tuple(pieces)


def _plan_split(
    split: str, parts: Sequence[GroupPart], num_tokens: int, size: int
) -> Iterator[ShardPlan]:
    ends = list(accumulate(part.shard.num_tokens for part in parts))
    first = 0
    for number, start in enumerate(range(0, num_tokens, size)):
        stop = start + size
        # Parts with a token in the range; the others were behind or are ahead.
        while ends[first] <= start:
            first += 1
        last = first
        while last < len(parts) and parts[last].start < stop:
            last += 1
        file = f"{split}/{number:06d}.arrow"
        yield ShardPlan(file=file, start=start, stop=stop, parts=tuple(parts[first:last]))


def _damaged(path: Path) -> Fault:
    return Fault(
        fact=f"{path} is not what its task wrote",
        rule="files of finished groups are kept to be joined",
        remedy="remove the folder _state and prepare again",
    )
