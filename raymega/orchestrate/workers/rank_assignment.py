"""Who has which rank: chosen among the processes that are there, or by where Ray will put them.

It sets the homes and ranks of slots. Which processes there are is placement_slots', and what those with a
rank are told is the worker group's.
"""

from __future__ import annotations

import logging
from collections import Counter

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
        """Nobody has a rank yet."""
        self._slots, self._parallel = slots, plan.job.parallel
        self.use(plan.grid)

    @property
    def assigned_slots(self) -> list[WorkerSlot]:
        """Those with a rank in the present attempt."""
        return [slot for slot in self._slots.slots if slot.assigned]

    def block_of(self, grid: Grid) -> int:
        """Workers of ``grid`` that must be together on a node."""
        return block_size(grid, self._parallel)

    def use(self, grid: Grid) -> None:
        """Ranks are those of ``grid`` from now on: nobody keeps what it had."""
        self.grid, self._block = grid, self.block_of(grid)
        for slot in self._slots.slots:
            slot.home = -1

    def nodes_of_ranks(self, nodes: list[NodeSlots]) -> tuple[str, ...]:
        """By rank a node that could host it.

        Raises:
            CapacityError: There is no room.
        """
        return place_ranks(nodes, self.grid, block=self._block)

    def nodes_of_blocks(self, nodes: list[NodeSlots]) -> list[str]:
        """For each block of workers that must be together a node of ``nodes``; none where they lack room."""
        try:
            num_ranks = Counter(self.nodes_of_ranks(nodes))
        except CapacityError:
            return []
        return [node for node, num in num_ranks.items() for _ in range(num // self._block)]

    def expect(self) -> list[WorkerLocation]:
        """Homes by where Ray has put the slots, and those places; none when homes are known.

        Ray renames nothing, so processes need their ranks for their names before they live.
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
        """By rank who could take it now, without any process that is still to come."""
        return self._ranks_of(self._slots.ready)

    def living_ranks(self) -> dict[int, WorkerSlot] | None:
        """The same, or else with processes that are there and load: they need no slots any more."""
        ranks = self.warm_ranks()
        return self._ranks_of(self._slots.living) if ranks is None else ranks

    def _ranks_of(self, slots: list[WorkerSlot]) -> dict[int, WorkerSlot] | None:
        locations = [slot.location for slot in slots if slot.location]
        homes = [slot.home for slot in slots]
        ranks = choose_ranks(locations, homes, self.grid, block=self._block)
        if ranks is None:
            return None
        return {rank: slot for rank, slot in zip(ranks, slots, strict=True) if rank >= 0}

    def choose(self) -> dict[int, WorkerSlot] | None:
        """Every rank has a process: its own, or else one that is warm and has none; None before."""
        awaited = [s for s in self._slots.slots if s.home >= 0 and not self._slots.is_leaving(s)]
        if len(awaited) == self.grid.world_size and all(slot.location for slot in awaited):
            return {slot.home: slot for slot in awaited}
        return self.warm_ranks()

    def assigned(self, chosen: dict[int, WorkerSlot]) -> list[WorkerSlot]:
        """Give seats to those that were chosen; by rank, the first is who hosts the rendezvous."""
        taken = [chosen[rank] for rank in sorted(chosen)]
        locations = [slot.location for slot in taken if slot.location]
        assigned_ranks = keep_ranks(locations, sorted(chosen), self.grid, block=self._block)
        if assigned_ranks is None:
            assigned_ranks = assign_ranks(locations, self.grid, block=self._block)
            log.warning("GPUs or nodes came in another order: some actors' names say other ranks")
        for slot in self._slots.slots:
            slot.home = -1
        for slot, assigned in zip(taken, assigned_ranks, strict=True):
            slot.assigned, slot.home = assigned, assigned.rank
        return sorted(taken, key=lambda slot: slot.rank)
