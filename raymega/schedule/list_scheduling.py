"""Builds one zero-bubble order by list scheduling: a free rank takes the most urgent work.

It owns the simulated play and the policies that steer it. The best policy is searched for by
`raymega.schedule.schedules.zero_bubble_auto`. Every rank has one stage and all micro-batches are
alike, so the order of a rank is a word of the letters F, B (input part) and W (weight part).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from raymega.schedule.order import Sizes

FORWARD, INPUT, WEIGHT = "F", "B", "W"
NEVER = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Choices that list scheduling leaves open; tuples hold one value per rank.

    Attributes:
        in_flight: Limit of micro-batches between their forward and their backward's input part.
        patience: Share of a weight part's time, 0 to 1; the weight part waits when other work
            arrives within it.
        delay: Largest delay of the first backward by a forward, in forward times.
        is_alternating: True if a forward goes first after the input part of a backward.
        is_balancing: True if a weight part waits only where the rank's idle time stays within the
            largest of all ranks.
    """

    in_flight: tuple[int, ...]
    patience: tuple[float, ...]
    delay: float
    is_alternating: bool
    is_balancing: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """An order and its cost.

    Attributes:
        words: Work of each rank as letters F, B and W.
        longest: Longest time of any rank from its first forward to its last work.
        idle: Idle time of each rank between its first forward and its last work.
    """

    words: tuple[str, ...]
    longest: float
    idle: tuple[float, ...]


def play(sizes: Sizes, policy: Policy) -> Played:
    """Build one order under ``policy`` within the activation limit of ``sizes``."""
    game = _Game(sizes, policy)
    while game.calls:
        now, rank = heappop(game.calls)
        # A rank's earlier calls stay in the heap; only its latest one counts.
        if now == game.next_call[rank]:
            game.act(now, rank)
    spans = [last - first for first, last in zip(game.first_start, game.last_end, strict=True)]
    return Played(
        words=tuple("".join(work) for work in game.work),
        longest=max(spans),
        idle=tuple(game.idle),
    )


class _Game:
    """State of all ranks, in lists by rank; arrivals of work are times, oldest first."""

    def __init__(self, sizes: Sizes, policy: Policy) -> None:
        pp, count = sizes.pp, sizes.num_micro_batches
        self.policy, self.last = policy, pp - 1
        self.limit = (sizes.max_in_flight_microbatches or pp) + 1e-9
        self.wgrad_activation_fraction = sizes.wgrad_activation_fraction
        times = sizes.times
        self.forward, self.weight = times.forward, times.weight
        self.input = times.backward - times.weight
        self.transfer = times.transfer
        # Arrival times of activations (forwards) and of gradients (inputs).
        self.forwards: list[list[float]] = [[] for _ in range(pp)]
        self.forwards[0] = [0.0] * count
        self.inputs: list[list[float]] = [[] for _ in range(pp)]
        self.num_forwards, self.num_inputs, self.num_weights = [0] * pp, [0] * pp, [0] * pp
        self.work: list[list[str]] = [[] for _ in range(pp)]
        self.idle, self.last_end, self.first_start = [0.0] * pp, [0.0] * pp, [0.0] * pp
        # Time at which each rank next looks for work; heap entries with another time are stale.
        self.next_call, self.is_waiting = [0.0] * pp, [False] * pp
        self.calls = [(0.0, rank) for rank in range(pp)]

    def act(self, now: float, rank: int) -> None:
        """Let the free rank begin a task, or wait for the next arrival."""
        done, there = self.num_inputs[rank], self.inputs[rank]
        backward = there[done] if done < len(there) else NEVER
        forward = self.forward_at(now, rank)
        is_turn = self.policy.is_alternating and self.work[rank][-1:] == [INPUT]
        # By urgency: a forward in its turn, input part, forward, weight part that may not wait.
        if forward <= now and (is_turn or backward > now):
            self.begin_forward(now, rank)
        elif backward <= now:
            self.begin_input(now, rank)
        elif self.num_weights[rank] < done and not self.waits(now, rank, min(backward, forward)):
            self.num_weights[rank] += 1
            self.occupy(now, rank, WEIGHT, now + self.weight)
        else:
            self.is_waiting[rank] = True
            self.call(min(backward, forward), rank)

    def forward_at(self, now: float, rank: int) -> float:
        """Return the arrival time of the next forward; NEVER if unknown or not allowed to begin."""
        begun, ended = self.num_forwards[rank], self.num_inputs[rank]
        there, policy = self.forwards[rank], self.policy
        if begun == len(there) or begun - ended >= policy.in_flight[rank]:
            return NEVER
        if self.held(rank) + 1 > self.limit:
            return NEVER
        if begun and not ended and policy.delay < NEVER:
            # The first backward cannot arrive before the first micro-batch reached the last
            # rank and its gradient came back.
            below = self.last - rank
            hop = self.forward + self.input + 2 * self.transfer
            first = self.first_start[rank] + self.forward + below * hop
            if max(now, there[begun]) + self.forward * (1 - policy.delay) > first:
                return NEVER
        return there[begun]

    def held(self, rank: int) -> float:
        """Return the activations held, in micro-batches; owed weight parts count in part."""
        begun, ended = self.num_forwards[rank], self.num_inputs[rank]
        return begun - ended + self.wgrad_activation_fraction * (ended - self.num_weights[rank])

    def waits(self, now: float, rank: int, arrival: float) -> bool:
        """Return True to wait for the next arrival rather than delay it by a weight part."""
        if arrival >= now + self.policy.patience[rank] * self.weight:
            return False
        if not self.policy.is_balancing:
            return True
        return self.idle[rank] + arrival - now <= max(self.idle)

    def begin_forward(self, now: float, rank: int) -> None:
        end = now + self.forward
        if self.num_forwards[rank] == 0:
            self.first_start[rank] = self.last_end[rank] = now
        self.num_forwards[rank] += 1
        self.occupy(now, rank, FORWARD, end)
        if rank == self.last:
            self.inputs[rank].append(end)
        else:
            self.deliver(self.forwards, rank + 1, end + self.transfer)

    def begin_input(self, now: float, rank: int) -> None:
        end = now + self.input
        self.num_inputs[rank] += 1
        self.occupy(now, rank, INPUT, end)
        if rank > 0:
            self.deliver(self.inputs, rank - 1, end + self.transfer)

    def occupy(self, now: float, rank: int, letter: str, end: float) -> None:
        self.work[rank].append(letter)
        self.idle[rank] += now - self.last_end[rank]
        self.last_end[rank] = end
        self.is_waiting[rank] = False
        self.call(end, rank)

    def deliver(self, arrivals: list[list[float]], rank: int, time: float) -> None:
        arrivals[rank].append(time)
        if self.is_waiting[rank] and time < self.next_call[rank]:
            self.call(time, rank)

    def call(self, time: float, rank: int) -> None:
        self.next_call[rank] = time
        if time < NEVER:
            heappush(self.calls, (time, rank))
