"""Reads a rank's blocks of a snapshot from the snapshot servers, and nothing that it does not need."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.coverage import uncovered_cells
from raymega.checkpoint.format.keys import CheckpointId, checkpoint_of, rank_of
from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.snapshots.queries import BoxQuestion, FoundBoxes, ask_boxes
from raymega.errors import CheckpointError, StorageError
from raymega.messages import SnapshotHolders
from raymega.plan.grid import Grid
from raymega.storage.replicated_store import ReplicatedStore
from raymega.storage.store import Store

log = logging.getLogger(__name__)

ASKED_AT_ONCE = 16
"""Snapshot servers that a rank asks at once."""


class SnapshotCopies(ReplicatedStore):
    """The copies of a snapshot in the memory of nodes, as one rank reads them."""

    def __init__(
        self, servers: Mapping[str, Store], holders: SnapshotHolders, *, first: int = 0
    ) -> None:
        """Read copies from ``servers``, by name.

        Args:
            servers: Snapshot servers of ``holders``.
            holders: Servers of each rank's share.
            first: Index of the copy to read first, modulo the number of copies.
        """
        super().__init__(servers, holders=_HoldersByKey(holders), first=first)
        self._servers, self._shares, self._copy = servers, holders, first

    def read_blocks(
        self, key: str, blocks: Mapping[str, Sequence[Box]], *, rank: int, grid: Grid
    ) -> Manifest:
        """Return the snapshot's manifest with the boxes that meet ``blocks``, which are by saved name.

        The rank asks for its own share, then wider, for those blocks that are not covered yet. On the grid
        that wrote the snapshot, shares of tensor and pipeline neighbours have what these keep for all, such as
        norms and a tied embedding, and replicas have what they divided. On another grid all ranks are asked.

        Args:
            key: Key of the snapshot's manifest.
            blocks: Blocks that the rank wants.
            rank: Global rank that reads.
            grid: Grid of the rank's attempt.

        Raises:
            CheckpointError: The part of a rank cannot be read from any of its holders.
        """
        at = checkpoint_of(key)
        assert at is not None, f"{key} is a manifest's"
        # widen the circle of ranks until every wanted block is covered
        boxes: list[SavedBox] = []
        state: dict[str, int | float | str] = {}
        missing = {name: tuple(of) for name, of in blocks.items()}
        for ranks in _wider(rank, grid, self._shares):
            for found in self._gather(at, missing, ranks):
                boxes += found.boxes
                state = found.state
            missing = _uncovered(missing, boxes)
            if not missing:
                break
        return Manifest(
            step=at.step, attempt=at.attempt, created="", state=state, job={},
            grid=dict(self._shares.grid), boxes=tuple(boxes),
        )  # fmt: skip

    def _gather(
        self, at: CheckpointId, blocks: dict[str, tuple[Box, ...]], ranks: Sequence[int]
    ) -> Iterator[FoundBoxes]:
        """Yield what the first holder of each rank's share answers, or another one where that one cannot."""

        def ask(server: str, of_server: list[int]) -> FoundBoxes | None:
            question = BoxQuestion(
                attempt=at.attempt, step=at.step, ranks=tuple(of_server), blocks=blocks
            )
            try:
                return ask_boxes(self._servers[server], question)
            except StorageError as error:
                log.warning("asking another copy: %s", error)
                return None

        left, copy = set(ranks), 0
        with ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="parts") as pool:
            while left:
                # one question a server, about all ranks whose share it holds
                by_server: dict[str, list[int]] = defaultdict(list)
                for rank in sorted(left):
                    names = self._shares.of(rank)
                    if copy >= len(names):
                        raise CheckpointError(f"the part of rank {rank} of {at} cannot be read")
                    by_server[names[(self._copy + copy) % len(names)]].append(rank)
                # ranks without an answer are asked for again, from their next copy
                for found in pool.map(ask, by_server, by_server.values()):
                    if found is not None:
                        left -= set(found.ranks)
                        yield found
                copy += 1


class _HoldersByKey:
    """Map from the key of a rank's object to the servers that hold it."""

    def __init__(self, holders: SnapshotHolders) -> None:
        self._holders = holders

    def get(self, key: str, default: Sequence[str] = (), /) -> Sequence[str]:
        rank = rank_of(key)
        return default if rank is None else self._holders.of(rank)


def _wider(rank: int, grid: Grid, holders: SnapshotHolders) -> Iterator[list[int]]:
    """Yield the ranks to ask next, each once."""
    asked: set[int] = set()
    groups: list[Sequence[int]] = [range(len(holders.by_rank))]
    if grid.degrees() == dict(holders.grid):
        # same grid: this rank, its neighbours on each axis, then pairs of axes
        replicas = [axis for axis in grid.dense_axes if axis not in ("tp", "pp")]
        around = ["tp"], ["pp"], replicas, ["tp", *replicas], ["pp", *replicas]
        groups = [[rank], *(grid.group(axes, rank) for axes in around), *groups]
    for group in groups:
        new = [each for each in group if each not in asked]
        asked.update(new)
        if new:
            yield new


def _uncovered(
    blocks: Mapping[str, tuple[Box, ...]], boxes: Sequence[SavedBox]
) -> dict[str, tuple[Box, ...]]:
    """Return the blocks of which some element is not in exactly one box."""
    saved: dict[str, list[Box]] = defaultdict(list)
    for each in boxes:
        saved[each.tensor].append(each.box)
    left = {
        name: tuple(block for block in of if any(uncovered_cells(block, saved[name])))
        for name, of in blocks.items()
    }
    return {name: of for name, of in left.items() if of}
