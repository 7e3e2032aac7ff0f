"""Choose the ranks and the micro-batch of each document in a step: dynamic context parallelism.

Static context parallelism cuts every document into as many parts as the longest one needs. Here
each pack of documents gets as few ranks as its memory and a fair share of the work allow. It is a
pure function of the documents' lengths, so every rank decides alike and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf, lcm

from raymega.errors import PlanError
from raymega.plan.packing.cost import PackCost, pairs_of
from raymega.plan.packing.rebalance import Rebalancer

SPREADS = (1.0, 1.3, 2.0, inf)
"""Multiples of the mean load that a document may cost before it is given more ranks. All are tried.
"""
MORE_ROUNDS = 2
"""Number of micro-batches that are tried beyond the fewest that could hold the tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Documents that neighbouring ranks hold together in one micro-batch.

    Attributes:
        first_rank: First rank of the pack, a multiple of ``size``; ranks count over dp * cp.
        size: Number of ranks, a power of two.
        documents: Indices of documents in the step; none where a rank has nothing to do.
        tokens: Number of tokens on each rank, padding included.
        seconds: Seconds of the pack by the formula.
    """

    first_rank: int
    size: int
    documents: tuple[int, ...]
    tokens: int
    seconds: float


Round = tuple[Pack, ...]
"""Micro-batch of all ranks: packs in the order of their ranks, every rank in one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackLimits:
    """Limits that a schedule of packs keeps.

    Attributes:
        num_ranks: Number of ranks, dp * cp, a power of two.
        max_tokens: Most tokens that one rank holds in one micro-batch.
        multiple: Divisor of a rank's tokens: tp where tp cuts positions, or cuts what experts get.
    """

    num_ranks: int
    max_tokens: int
    multiple: int = 1

    def tokens_a_rank(self, padded: int, size: int) -> int:
        """Return the tokens on each of ``size`` ranks of documents with ``padded`` tokens together."""
        unit = lcm(self.multiple, 2) if size > 1 else self.multiple
        return -(-padded // (size * unit)) * unit


def padded_length(length: int, size: int) -> int:
    """Return a document's length, padded for ``size`` ranks with two equal chunks each."""
    unit = 2 * size if size > 1 else 1
    return -(-length // unit) * unit


def schedule_documents(
    lengths: Sequence[int], limits: PackLimits, cost: PackCost
) -> tuple[Round, ...]:
    """Return the micro-batches of a step; each document is in one pack.

    All ranks have equally many micro-batches, and in each of them every rank is in one pack. Any
    pipeline schedule then runs the same list everywhere, and no two groups wait for each other.

    Args:
        lengths: Number of tokens of each document, at least 1.
        limits: Limits that the schedule keeps.
        cost: Cost model that decides between legal schedules.

    Raises:
        PlanError: A document does not fit all ranks together.
    """
    _check(lengths, limits)
    fewest = max(1, -(-sum(lengths) // (limits.num_ranks * limits.max_tokens)))
    best: tuple[Round, ...] | None = None
    num_rounds = fewest
    while best is None or num_rounds <= fewest + MORE_ROUNDS:
        for spread in SPREADS:
            found = _attempt(lengths, limits, cost, num_rounds=num_rounds, spread=spread)
            if found is not None and (best is None or _is_sooner(found, best, limits)):
                best = found
        num_rounds += 1
    return best


def finish_seconds(rounds: Sequence[Round], num_ranks: int) -> float:
    """Return when the last rank is done; a pack begins when all its ranks are free."""
    at = [0.0] * num_ranks
    for pack in (pack for packs in rounds for pack in packs):
        ranks = slice(pack.first_rank, pack.first_rank + pack.size)
        at[ranks] = [max(at[ranks]) + pack.seconds] * pack.size
    return max(at)


def imbalance(rounds: Sequence[Round], num_ranks: int) -> float:
    """Return the largest over the mean work of the ranks."""
    work = [0.0] * num_ranks
    for pack in (pack for packs in rounds for pack in packs):
        for rank in range(pack.first_rank, pack.first_rank + pack.size):
            work[rank] += pack.seconds
    return max(work) * num_ranks / sum(work)


def _is_sooner(one: Sequence[Round], other: Sequence[Round], limits: PackLimits) -> bool:
    return finish_seconds(one, limits.num_ranks) < finish_seconds(other, limits.num_ranks)


def least_size(length: int, limits: PackLimits) -> int:
    """Return the fewest ranks, a power of two, that can hold a document."""
    size = 1
    while limits.tokens_a_rank(padded_length(length, size), size) > limits.max_tokens:
        size *= 2
    return size


@dataclass(kw_only=True, slots=True)
class _Bin:
    """Pack under construction; ``tokens`` are those of its documents, padded for ``size``."""

    size: int
    documents: list[int] = field(default_factory=list)
    tokens: int = 0
    pairs: int = 0

    def with_document(self, length: int, limits: PackLimits, cost: PackCost) -> float | None:
        """Return the seconds with one more document, or None when it does not fit."""
        tokens = limits.tokens_a_rank(self.tokens + padded_length(length, self.size), self.size)
        if tokens > limits.max_tokens:
            return None
        return cost.seconds(tokens=tokens, pairs=self.pairs + pairs_of(length), size=self.size)

    def add(self, document: int, length: int) -> None:
        self.documents.append(document)
        self.tokens += padded_length(length, self.size)
        self.pairs += pairs_of(length)

    def seconds(self, limits: PackLimits, cost: PackCost) -> float:
        tokens = limits.tokens_a_rank(self.tokens, self.size)
        return cost.seconds(tokens=tokens, pairs=self.pairs, size=self.size)


def _attempt(
    lengths: Sequence[int], limits: PackLimits, cost: PackCost, *, num_rounds: int, spread: float
) -> tuple[Round, ...] | None:
    """Return a schedule with ``num_rounds`` micro-batches, or None when documents do not fit."""
    slots = limits.num_ranks * num_rounds
    least = [least_size(length, limits) for length in lengths]
    alone = [
        size * (_alone_seconds(n, size, limits, cost) - cost.start_s)
        for n, size in zip(lengths, least, strict=True)
    ]
    # The load that each slot should have, and ranks for each document.
    target = cost.start_s + spread * sum(alone) / slots
    sizes = [
        _fair_size(n, size, target, limits, cost) for n, size in zip(lengths, least, strict=True)
    ]
    shelves = _Shelves(limits, cost, free=slots, target=target)
    # Longest first, as for any load balancing by a greedy rule; ties by the order of the step.
    for document in sorted(range(len(lengths)), key=lambda i: (-sizes[i], -lengths[i], i)):
        wanted = sizes[document]
        if not shelves.put(document, lengths[document], wanted=wanted, least=least[document]):
            return None
    bins = _widened(shelves.bins, shelves.free, lengths, limits, cost)
    return _evened(_in_rounds(bins, limits, cost), lengths, limits, cost)


def _alone_seconds(length: int, size: int, limits: PackLimits, cost: PackCost) -> float:
    tokens = limits.tokens_a_rank(padded_length(length, size), size)
    return cost.seconds(tokens=tokens, pairs=pairs_of(length), size=size)


def _fair_size(length: int, size: int, target: float, limits: PackLimits, cost: PackCost) -> int:
    """Return the ranks of a document: what memory needs, and more while it costs above ``target``."""
    seconds = _alone_seconds(length, size, limits, cost)
    while size < limits.num_ranks and seconds > target:
        wider = _alone_seconds(length, 2 * size, limits, cost)
        if wider >= seconds:
            break
        size, seconds = 2 * size, wider
    return size


class _Shelves:
    """Bins by their size; each shelf is a heap by what its bins cost so far."""

    def __init__(self, limits: PackLimits, cost: PackCost, *, free: int, target: float) -> None:
        self._limits, self._cost, self._target = limits, cost, target
        self._shelves: dict[int, list[tuple[float, int]]] = {}
        self._loads: list[float] = []
        self.free = free
        self.bins: list[_Bin] = []

    def put(self, document: int, length: int, *, wanted: int, least: int) -> bool:
        """Put a document where the load stays lowest; return False when there is no room.

        A bin of its size is opened while there are slots and those that are open would cost more
        than the target. Documents of one rank get all slots that are left, and fill up larger bins.
        """
        # a bin of the wanted size: an open one below the target, else a new one
        own = self._cheapest(length, [wanted])
        if wanted == 1 or own is None or own[0] > self._target:
            while self._open(wanted) and wanted == 1:
                pass
            own = self._cheapest(length, [wanted])
            if own is None:
                own = self._cheapest(length, self._sizes(wanted))
        # else any bin that memory allows
        if own is None and least < wanted:
            own = self._cheapest(length, self._sizes(least))
            if own is None and self._open(least):
                own = self._cheapest(length, [least])
        if own is None:
            return False
        self.bins[own[1]].add(document, length)
        self._shelve(own[1])
        return True

    def _sizes(self, at_least: int) -> list[int]:
        return [size for size in self._shelves if size >= at_least]

    def _open(self, size: int) -> bool:
        if size > self.free:
            return False
        self.free -= size
        self.bins.append(_Bin(size=size))
        self._loads.append(0.0)
        self._shelve(len(self.bins) - 1)
        return True

    def _shelve(self, number: int) -> None:
        made = self.bins[number]
        self._loads[number] = made.seconds(self._limits, self._cost)
        heappush(self._shelves.setdefault(made.size, []), (self._loads[number], number))

    def _cheapest(self, length: int, sizes: Sequence[int]) -> tuple[float, int] | None:
        """Return the cost and number of the bin with room that costs least with the document."""
        found = [self._first_with_room(self._shelves.get(size, []), length) for size in sizes]
        return min((entry for entry in found if entry is not None), default=None)

    def _first_with_room(
        self, shelf: list[tuple[float, int]], length: int
    ) -> tuple[float, int] | None:
        """Return the shelf's cheapest bin with room; bins before it are put back."""
        passed, found = [], None
        while shelf and found is None:
            load, number = shelf[0]
            if load == self._loads[number]:  # else it was shelved again since
                seconds = self.bins[number].with_document(length, self._limits, self._cost)
                if seconds is not None:
                    found = (seconds, number)
                    break
                passed.append(shelf[0])
            heappop(shelf)
        for entry in passed:
            heappush(shelf, entry)
        return found


def _widened(
    made: Sequence[_Bin], free: int, lengths: Sequence[int], limits: PackLimits, cost: PackCost
) -> list[_Bin]:
    """Give unused slots to the packs that cost most, as far as that helps."""
    bins = list(made)
    while free:
        by_load = sorted(range(len(bins)), key=lambda i: (-bins[i].seconds(limits, cost), i))
        most = next((i for i in by_load if bins[i].size <= min(free, limits.num_ranks // 2)), None)
        if most is None:
            break
        wide = _Bin(size=2 * bins[most].size)
        for document in bins[most].documents:
            wide.add(document, lengths[document])
        is_too_much = limits.tokens_a_rank(wide.tokens, wide.size) > limits.max_tokens
        if is_too_much or wide.seconds(limits, cost) >= bins[most].seconds(limits, cost):
            break
        free -= bins[most].size
        bins[most] = wide
    return bins + [_Bin(size=1) for _ in range(free)]


def _in_rounds(bins: list[_Bin], limits: PackLimits, cost: PackCost) -> tuple[Round, ...]:
    """Place bins side by side, large ones first: then each begins at a multiple of its size.

    Among bins of a size the longest goes to the ranks that have least work so far, which evens out
    the work of ranks.
    """
    num_ranks = limits.num_ranks
    packs: list[list[Pack]] = [[] for _ in range(sum(made.size for made in bins) // num_ranks)]
    load, start = [0.0] * num_ranks, 0
    for size in sorted({made.size for made in bins}, reverse=True):
        mine = [(made.seconds(limits, cost), made) for made in bins if made.size == size]
        mine.sort(key=lambda one: (-one[0], one[1].documents))
        rounds: dict[int, list[int]] = {}  # first rank to the rounds in which it has a place
        for at in range(start, start + size * len(mine), size):
            rounds.setdefault(at % num_ranks, []).append(at // num_ranks)
        start += size * len(mine)
        # The longest bin goes to the place with the least work.
        least = [(max(load[first : first + size]), first) for first in rounds]
        heapify(least)
        for seconds, made in mine:
            so_far, first = heappop(least)
            packs[rounds[first].pop(0)].append(_pack_of(made, first, seconds, limits))
            load[first : first + size] = [so_far + seconds] * size
            if rounds[first]:
                heappush(least, (so_far + seconds, first))
    return tuple(tuple(sorted(one, key=lambda pack: pack.first_rank)) for one in packs)


def _evened(
    rounds: Sequence[Round], lengths: Sequence[int], limits: PackLimits, cost: PackCost
) -> tuple[Round, ...]:
    """Exchange documents of single ranks until ranks end together."""
    at_rank = [[pack for pack in packs for _ in range(pack.size)] for packs in rounds]
    lists = list(zip(*at_rank, strict=True))
    # The number of micro-batches after which a rank shares no pack any more.
    shared = [
        max((i + 1 for i, pack in enumerate(mine) if pack.size > 1), default=0) for mine in lists
    ]
    evening = Rebalancer(
        _starts(rounds, shared),
        [
            [pack.documents for pack in mine[done:]]
            for mine, done in zip(lists, shared, strict=True)
        ],
        lengths,
        room=limits.max_tokens - limits.max_tokens % limits.multiple,
        seconds=lambda tokens, pairs: cost.seconds(
            tokens=limits.tokens_a_rank(tokens, 1), pairs=pairs, size=1
        ),
    )
    # Replace the packs that have changed.
    made = [list(packs) for packs in rounds]
    for rank, (done, mine) in enumerate(zip(shared, evening.run(), strict=True)):
        for index, documents in enumerate(mine, start=done):
            at = made[index].index(lists[rank][index])
            single = _Bin(size=1)
            for document in sorted(documents):
                single.add(document, lengths[document])
            made[index][at] = _pack_of(single, rank, single.seconds(limits, cost), limits)
    return tuple(tuple(packs) for packs in made)


def _starts(rounds: Sequence[Round], shared: Sequence[int]) -> list[float]:
    """Return when each rank is done with its first ``shared`` micro-batches."""
    at = [0.0] * len(shared)
    for index, packs in enumerate(rounds):
        for pack in packs:
            ranks = slice(pack.first_rank, pack.first_rank + pack.size)
            if index < shared[pack.first_rank]:
                at[ranks] = [max(at[ranks]) + pack.seconds] * pack.size
    return at


def _pack_of(made: _Bin, first_rank: int, seconds: float, limits: PackLimits) -> Pack:
    return Pack(
        first_rank=first_rank,
        size=made.size,
        documents=tuple(made.documents),
        tokens=limits.tokens_a_rank(max(1, made.tokens), made.size),
        seconds=seconds,
    )


def _check(lengths: Sequence[int], limits: PackLimits) -> None:
    # a rank's room, rounded down to what chunks and tp divide
    longest = max(lengths, default=0)
    unit = lcm(limits.multiple, 2) if limits.num_ranks > 1 else limits.multiple
    room = limits.num_ranks * (limits.max_tokens - limits.max_tokens % unit)
    if longest <= room:
        return
    raise PlanError(
        fact=f"a document of {longest} tokens",
        rule=f"{limits.num_ranks} ranks of {limits.max_tokens} tokens each hold {room} together",
        remedy="use a shorter data.seq_len, or more ranks in dp * cp",
    )
