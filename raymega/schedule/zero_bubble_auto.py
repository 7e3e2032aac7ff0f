"""zb_auto: the best of many zero-bubble orders that keep a limit on activations.

It owns the search. After Qi et al., ICLR 2024 (https://arxiv.org/abs/2401.10241, section 3.1): an
order is built by letting every rank, whenever it is free, take the most urgent work that is there:
a backward, else a forward if memory allows, else a weight part that is owed. The choices that no
rule settles are tried out, ZB-H1 and ZB-H2 are candidates too, and the simulated time decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import product

from raymega.schedule.checker import check
from raymega.schedule.instructions import Schedule
from raymega.schedule.order import Order, Sizes
from raymega.schedule.placement import Placement
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.timeline import bubble
from raymega.schedule.transfers import make_program
from raymega.schedule.zero_bubble import zb_h1, zb_h2


def zb_auto(sizes: Sizes, durations: Durations | None = None) -> tuple[Schedule, ...]:
    """The work of every rank: at most ``max_activations`` held, ``pp`` when that is 0.

    Args:
        sizes: Of the step; one chunk a rank.
        durations: What the search is for; equal times of F, B and W when left out.
    """
    durations = durations or Durations()
    limit = sizes.max_activations or sizes.pp
    best, best_cost = None, (float("inf"), 0)
    for candidate in _candidates(sizes, limit, durations):
        program = make_program(candidate, Placement(pp=sizes.pp))
        peak = max(check(program, num_micro_batches=sizes.num_micro_batches).peak_activations)
        if peak > limit:
            continue
        events = simulate(program, durations).events
        cost = (bubble(events).ratio, peak)
        if cost < best_cost:
            best, best_cost = candidate, cost
    assert best is not None, "one micro-batch at a time is always a candidate"
    return best


def _candidates(sizes: Sizes, limit: int, durations: Durations) -> Iterator[tuple[Schedule, ...]]:
    yield zb_h1(sizes)
    yield zb_h2(sizes)
    choices = product(
        sorted({limit, min(limit, sizes.pp)}), (1, 2), (0.0, 0.5, float("inf")), (False, True)
    )
    for held, lead, delay, is_weight_patient in choices:
        policy = _Policy(held=held, lead=lead, delay=delay, is_weight_patient=is_weight_patient)
        yield _Search(sizes, policy, durations).run()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Policy:
    """What no rule settles.

    Attributes:
        held: Most micro-batches that a rank holds.
        lead: Forwards that a rank may be ahead of the next one, beyond what fills the pipe, in
            units of its distance from the last rank; 2 is no bound but memory.
        delay: How late a forward may make the first backward, in forwards.
        is_weight_patient: A weight part waits when the next backward would come in its midst.
    """

    held: int
    lead: int
    delay: float
    is_weight_patient: bool


@dataclass(kw_only=True, slots=True)
class _Rank:
    order: Order
    held: int = 0
    owed: int = 0
    num_forwards: int = 0
    num_backwards: int = 0
    first_end: float = 0.0
    is_asleep: bool = False
    arrived_forwards: deque[float] = field(default_factory=deque)
    arrived_backwards: deque[float] = field(default_factory=deque)


class _Search:
    """Builds one order by playing it: the rank that is free first chooses first."""

    def __init__(self, sizes: Sizes, policy: _Policy, durations: Durations) -> None:
        self._sizes, self._policy, self._durations = sizes, policy, durations
        count = sizes.num_micro_batches
        self._ranks = [_Rank(order=Order(count)) for _ in range(sizes.pp)]
        self._ranks[0].arrived_forwards.extend([0.0] * count)
        self._free: list[tuple[float, int]] = [(0.0, rank) for rank in range(sizes.pp)]

    def run(self) -> tuple[Schedule, ...]:
        """Play to the end; the work of every rank."""
        while self._free:
            now, index = heappop(self._free)
            self._act(now, index)
        return tuple(rank.order.work for rank in self._ranks)

    def _act(self, now: float, index: int) -> None:
        rank = self._ranks[index]
        backward = rank.arrived_backwards[0] if rank.arrived_backwards else float("inf")
        forward = rank.arrived_forwards[0] if self._may_forward(now, index) else float("inf")
        if backward <= now:
            self._backward(now, index)
        elif forward <= now:
            self._forward(now, index)
        elif rank.owed and not self._is_waiting_better(now, rank, min(backward, forward)):
            rank.order.backward_weight()
            rank.owed, rank.held = rank.owed - 1, rank.held - 1
            heappush(self._free, (now + self._durations.weight, index))
        elif min(backward, forward) < float("inf"):
            heappush(self._free, (min(backward, forward), index))
        else:
            rank.is_asleep = True

    def _is_waiting_better(self, now: float, rank: _Rank, arrival: float) -> bool:
        if rank.held >= self._policy.held and not rank.arrived_backwards:
            return False
        return self._policy.is_weight_patient and arrival < now + self._durations.weight

    def _may_forward(self, now: float, index: int) -> bool:
        rank, policy, times = self._ranks[index], self._policy, self._durations
        if not rank.arrived_forwards or rank.held >= policy.held:
            return False
        below = self._sizes.pp - index - 1
        if rank.num_forwards and not rank.num_backwards:
            # The first backward cannot be here before the first micro-batch went down and came up.
            hop = times.forward + times.backward - times.weight + 2 * times.transfer
            if now + times.forward * (1 - policy.delay) > rank.first_end + below * hop:
                return False
        in_flight = rank.num_forwards - rank.num_backwards
        return policy.lead == 2 or in_flight < 1 + below * (1 + policy.lead)

    def _forward(self, now: float, index: int) -> None:
        rank, end = self._ranks[index], now + self._durations.forward
        rank.order.forward()
        if rank.num_forwards == 0:
            rank.first_end = end
        rank.arrived_forwards.popleft()
        rank.held, rank.num_forwards = rank.held + 1, rank.num_forwards + 1
        heappush(self._free, (end, index))
        if index == self._sizes.pp - 1:
            rank.arrived_backwards.append(end)
        else:
            self._deliver(index + 1, end + self._durations.transfer, is_forward=True)

    def _backward(self, now: float, index: int) -> None:
        rank = self._ranks[index]
        end = now + self._durations.backward - self._durations.weight
        rank.order.backward_input()
        rank.arrived_backwards.popleft()
        rank.owed, rank.num_backwards = rank.owed + 1, rank.num_backwards + 1
        heappush(self._free, (end, index))
        if index > 0:
            self._deliver(index - 1, end + self._durations.transfer, is_forward=False)

    def _deliver(self, index: int, time: float, *, is_forward: bool) -> None:
        rank = self._ranks[index]
        (rank.arrived_forwards if is_forward else rank.arrived_backwards).append(time)
        if rank.is_asleep:
            rank.is_asleep = False
            heappush(self._free, (time, index))
