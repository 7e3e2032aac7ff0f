"""Builds one zero-bubble order by playing it: a rank that is free takes the most urgent work there is.

It owns the play and the policies that it follows; which policy is best is zero_bubble_auto's to
find. All ranks have one stage, and all micro-batches are alike, so an order is a word of three
letters a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from raymega.schedule.order import Sizes

FORWARD, INPUT, WEIGHT = "F", "B", "W"
NEVER = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What no rule settles; tuples are by rank.

    Attributes:
        in_flight: Most micro-batches between their forward and the first part of their backward.
        patience: A weight part waits when other work will be there after this share of it.
        delay: How late a forward may make the first backward, in forwards.
        is_alternating: After a first part of a backward a forward goes first.
        is_balancing: A weight part waits also when the rank has idled less than another one.
    """

    in_flight: tuple[int, ...]
    patience: tuple[float, ...]
    delay: float
    is_alternating: bool
    is_balancing: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """An order and what it costs.

    Attributes:
        words: By rank, its work as letters.
        longest: The longest time that a rank needs from its first forward to its last work.
        idle: By rank, time within that in which it waits.
    """

    words: tuple[str, ...]
    longest: float
    idle: tuple[float, ...]


def play(sizes: Sizes, policy: Policy) -> Played:
    """One order; no rank ever holds more than ``sizes`` allow."""
    game = _Game(sizes, policy)
    while game.calls:
        now, rank = heappop(game.calls)
        if now == game.next_call[rank]:
            game.act(now, rank)
    spans = [last - first for first, last in zip(game.first_start, game.last_end, strict=True)]
    return Played(
        words=tuple("".join(work) for work in game.work),
        longest=max(spans),
        idle=tuple(game.idle),
    )


class _Game:
    """The state of all ranks, in lists by rank; arrivals are times, oldest first."""

    def __init__(self, sizes: Sizes, policy: Policy) -> None:
        pp, count = sizes.pp, sizes.num_micro_batches
        self.policy, self.last = policy, pp - 1
        self.limit = (sizes.max_in_flight_microbatches or pp) + 1e-9
        self.wgrad_activation_fraction = sizes.wgrad_activation_fraction
        times = sizes.times
        self.forward, self.weight = times.forward, times.weight
        self.input = times.backward - times.weight
        self.transfer = times.transfer
        self.forwards: list[list[float]] = [[] for _ in range(pp)]
        self.forwards[0] = [0.0] * count
        self.inputs: list[list[float]] = [[] for _ in range(pp)]
        self.num_forwards, self.num_inputs, self.num_weights = [0] * pp, [0] * pp, [0] * pp
        self.work: list[list[str]] = [[] for _ in range(pp)]
        self.idle, self.last_end, self.first_start = [0.0] * pp, [0.0] * pp, [0.0] * pp
        # When each rank looks for work next; an entry of the heap that says otherwise is out of date.
        self.next_call, self.is_waiting = [0.0] * pp, [False] * pp
        self.calls = [(0.0, rank) for rank in range(pp)]

    def act(self, now: float, rank: int) -> None:
        """Let ``rank``, which is free, begin something, wait or sleep."""
        done, there = self.num_inputs[rank], self.inputs[rank]
        backward = there[done] if done < len(there) else NEVER
        forward = self.forward_at(now, rank)
        is_turn = self.policy.is_alternating and self.work[rank][-1:] == [INPUT]
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
        """When the next forward is there, NEVER when it is unknown or must not be begun."""
        begun, ended = self.num_forwards[rank], self.num_inputs[rank]
        there, policy = self.forwards[rank], self.policy
        if begun == len(there) or begun - ended >= policy.in_flight[rank]:
            return NEVER
        if self.held(rank) + 1 > self.limit:
            return NEVER
        if begun and not ended and policy.delay < NEVER:
            # The first backward cannot be here before the first micro-batch went down and came up.
            below = self.last - rank
            hop = self.forward + self.input + 2 * self.transfer
            first = self.first_start[rank] + self.forward + below * hop
            if max(now, there[begun]) + self.forward * (1 - policy.delay) > first:
                return NEVER
        return there[begun]

    def held(self, rank: int) -> float:
        """Activations, in micro-batches; one whose weight part is owed counts in part."""
        begun, ended = self.num_forwards[rank], self.num_inputs[rank]
        return begun - ended + self.wgrad_activation_fraction * (ended - self.num_weights[rank])

    def waits(self, now: float, rank: int, arrival: float) -> bool:
        """Whether to wait for what arrives rather than do a weight part that delays it."""
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
