"""Assigns ranks to slots: to processes that exist, or by the nodes on which Ray has placed the slots.

It sets the ``home`` and ``assigned`` fields of slots. ``workers/placement_slots.py`` owns slots and processes;
``workers/ray_worker_group.py`` sends the messages.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from raymega.errors import CapacityError
from raymega.messages import NodeSlots
from raymega.orchestrate.core.rank_placement import (
    WorkerLocation,
    assign_ranks,
    block_size,
    choose_ranks,
    keep_ranks,
    place_ranks,
)
from raymega.orchestrate.workers.placement_slots import WorkerSlot, WorkerSlots
from raymega.plan.grid import Grid
from raymega.plan.run_plan import RunPlan

log = logging.getLogger(__name__)


class RankAssignment:
    """The ranks of one run's slots on its present grid."""

    def __init__(self, slots: WorkerSlots, plan: RunPlan) -> None:
        """Begin without ranks, on the grid of ``plan``."""
        self._slots, self._parallel = slots, plan.job.parallel
        self.use(plan.grid, {})

    @property
    def assigned_slots(self) -> list[WorkerSlot]:
        """Slots with a rank in the present attempt."""
        return [slot for slot in self._slots.slots if slot.assigned]

    def block_of(self, grid: Grid) -> int:
        """Return the number of workers of ``grid`` that must share a node."""
        return block_size(grid, self._parallel)

    def use(self, grid: Grid, homes: Mapping[int, int]) -> None:
        """Assign the ranks of ``grid`` from now on; a slot's last rank becomes the one in ``homes``, or none."""
        self.grid, self._block = grid, self.block_of(grid)
        for slot in self._slots.slots:
            slot.home = homes.get(slot.home, -1)

    def nodes_of_ranks(self, nodes: list[NodeSlots]) -> tuple[str, ...]:
        """Return for each rank the id of a node that could host it.

        Raises:
            CapacityError: The nodes have too few slots.
        """
        return place_ranks(nodes, self.grid, block=self._block)

    def nodes_of_blocks(self, nodes: list[NodeSlots]) -> list[str]:
        """Return a node id for each block of workers that must share a node; [] if there is no room."""
        try:
            num_ranks = Counter(self.nodes_of_ranks(nodes))
        except CapacityError:
            return []
        return [node for node, num in num_ranks.items() for _ in range(num // self._block)]

    def expect(self) -> list[WorkerLocation]:
        """Set homes by the nodes of the slots, and return the slots' locations; [] if homes are set already.

        An actor's name contains its rank and cannot be changed, so the rank must be known before it starts.
        """
        if any(slot.home >= 0 for slot in self._slots.slots):
            return []
        main = [slot for slot in self._slots.slots if not slot.is_spare]
        locations = self._slots.expected_locations()
        assigned_ranks = assign_ranks(locations, self.grid, block=self._block)
        for slot, assigned in zip(main, assigned_ranks, strict=True):
            slot.home = assigned.rank
        return locations

    def warm_ranks(self) -> dict[int, WorkerSlot] | None:
        """Return a slot for each rank, among those whose process is loaded; None if they do not suffice."""
        return self._ranks_of(self._slots.ready)

    def living_ranks(self) -> dict[int, WorkerSlot] | None:
        """Return the same, or else with processes that are still loading, which have their slots already."""
        ranks = self.warm_ranks()
        return self._ranks_of(self._slots.living) if ranks is None else ranks

    def _ranks_of(self, slots: list[WorkerSlot]) -> dict[int, WorkerSlot] | None:
        if len(slots) < self.grid.world_size:
            return None
        locations = [slot.location for slot in slots if slot.location]
        # a process keeps its last rank where it can
        homes = [slot.home for slot in slots]
        ranks = choose_ranks(locations, homes, self.grid, block=self._block)
        if ranks is None:
            return None
        return {rank: slot for rank, slot in zip(ranks, slots, strict=True) if rank >= 0}

    def choose(self) -> dict[int, WorkerSlot] | None:
        """Return a slot for each rank once every rank has a process, else None."""
        # every expected process has come
        awaited = [s for s in self._slots.slots if s.home >= 0 and not self._slots.is_leaving(s)]
        if len(awaited) == self.grid.world_size and all(slot.location for slot in awaited):
            return {slot.home: slot for slot in awaited}
        # or loaded ones suffice, spares included
        return self.warm_ranks()

    def num_lacking(self) -> int:
        """Return how many answers of processes must come at least before ``choose`` can succeed; 1 or more."""
        # of the expected processes that have no location, or of those that must still load
        awaited = [slot for slot in self._slots.slots if slot.home >= 0]
        num_unplaced = sum(slot.location is None for slot in awaited)
        num_unloaded = self.grid.world_size - len(self._slots.ready)
        return max(1, min(num_unplaced, num_unloaded))

    def assigned(self, chosen: dict[int, WorkerSlot]) -> list[WorkerSlot]:
        """Assign ranks to the chosen slots and return them by rank; the first hosts the rendezvous."""
        # the ranks that they were chosen for, unless GPUs or nodes rule these out
        taken = [chosen[rank] for rank in sorted(chosen)]
        locations = [slot.location for slot in taken if slot.location]
        assigned_ranks = keep_ranks(locations, sorted(chosen), self.grid, block=self._block)
        if assigned_ranks is None:
            assigned_ranks = assign_ranks(locations, self.grid, block=self._block)
            log.warning(
                "GPUs or nodes came in another order: some actors have names of other ranks"
            )
        # homes of the next attempt are these ranks
        for slot in self._slots.slots:
            slot.home = -1
        for slot, assigned in zip(taken, assigned_ranks, strict=True):
            slot.assigned, slot.home = assigned, assigned.rank
        return sorted(taken, key=lambda slot: slot.rank)
