"""A rank's part of a snapshot: the object, put after the rank's data, that lists what it wrote."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from raymega.checkpoint.format.box_table import BoxTable
from raymega.checkpoint.format.keys import folder_of, part_file
from raymega.messages import ShardSaved


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotPart:
    """Record of what one rank wrote of a snapshot.

    Attributes:
        attempt: Number of the attempt that wrote it.
        grid: Degrees of the axes of the attempt's grid.
        world_size: Number of parts that make the snapshot whole.
        shard: Boxes of the rank and scalars of the trainer.
    """

    attempt: int
    grid: dict[str, int]
    world_size: int
    shard: ShardSaved

    @property
    def key(self) -> str:
        """Key of the part in a snapshot server."""
        shard = self.shard
        return folder_of(shard.step) + part_file(attempt=self.attempt, rank=shard.rank)

    def to_json(self) -> bytes:
        """Return the content of the part's object."""
        shard = replace(self.shard, boxes=tuple(self.shard.boxes))
        return _ADAPTER.dump_json(replace(self, shard=shard))


_ADAPTER: TypeAdapter[SnapshotPart] = TypeAdapter(SnapshotPart)


def parse_part(text: bytes) -> SnapshotPart:
    """Parse what :meth:`SnapshotPart.to_json` wrote, with its boxes as a table.

    Raises:
        ValidationError: The text is damaged.
    """
    part = _ADAPTER.validate_json(text, strict=True)
    return replace(part, shard=replace(part.shard, boxes=BoxTable.of(part.shard.boxes)))
