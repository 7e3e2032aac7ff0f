"""Estimate the seconds of a pipeline step beyond the work of its busiest rank, by closed forms.

A step waits for the longest paths through the order of its schedule. A path has some forwards,
input gradients and weight gradients more than one rank itself runs, or fewer, and some messages.
Their durations decide which path is the longest; ranks may differ in speed.
``raymega.planner.cost.step_time`` adds the effect of chunks of unequal length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple


class Path(NamedTuple):
    """Path through a schedule, counted in passes of one chunk.

    Attributes:
        forwards: Number of forwards beyond those of the rank itself; negative for fewer.
        inputs: Number of input gradients beyond those of the rank itself.
        weights: Number of weight gradients beyond those of the rank itself.
        messages: Number of messages on the path.
        left_forwards: Number of the rank's forwards that are not on the path.
        left_backwards: Number of the rank's backwards that are not on the path.
    """

    forwards: int
    inputs: int
    weights: int
    messages: int
    left_forwards: int = 0
    left_backwards: int = 0


class Passes(NamedTuple):
    """Seconds of one micro-batch through all chunks of a rank."""

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def total_s(self) -> float:
        """Sum of the three passes."""
        return self.forward_s + self.input_s + self.weight_s

    def plus(self, more: Passes) -> Passes:
        """Return the sum with ``more``, pass by pass."""
        return Passes(*(mine + other for mine, other in zip(self, more, strict=True)))

    def along(self, path: Path) -> float:
        """Return the seconds of the passes on ``path``, times the number of chunks.

        Messages are not included.
        """
        return (
            path.forwards * self.forward_s
            + path.inputs * self.input_s
            + path.weights * self.weight_s
        )

    def left(self, path: Path) -> float:
        """Return the seconds of the rank's own passes that are not on ``path``."""
        backward_s = self.input_s + self.weight_s
        return path.left_forwards * self.forward_s + path.left_backwards * backward_s


class RankTimes(NamedTuple):
    """First and last rank of one kind, and the seconds of the passes of each."""

    pp_ranks: tuple[int, ...]
    passes: Passes


def waiting_s(  # noqa: PLR0913  # one a size
    name: str,
    *,
    chunks: int,
    num_micro_batches: int,
    ranks: Sequence[RankTimes],
    mean: Passes,
    pp: int,
    message_s: float,
) -> tuple[float, float]:
    """Return the seconds of waiting for passes of other ranks, and for messages.

    The longest path crosses all ranks alike. Or it has all passes of one rank, for which the others
    wait, and the passes of others that this rank waits for.

    Args:
        name: Name of the schedule.
        chunks: Number of chunks on a rank.
        num_micro_batches: Number of micro-batches in the step.
        ranks: Passes of each kind of rank.
        mean: Mean passes over all ranks.
        pp: Number of ranks in the pipeline.
        message_s: Seconds to send one activation of all chunks from one rank to the next.
    """
    num = num_micro_batches
    # Paths that cross all ranks alike.
    paths = waiting_paths(name, pp=pp, chunks=chunks, num_micro_batches=num)
    alike_s, longest = num * mean.total_s, (0.0, 0.0)
    for path in paths:
        wait_s, messages_s = _priced(path, mean, chunks, message_s)
        longest = max(longest, (alike_s + wait_s, messages_s))
    # Paths with all passes of one rank.
    for pp_ranks, passes in ranks:
        others, own_s = _others(mean, passes, pp), num * passes.total_s
        for pp_rank in pp_ranks:
            for path in own_paths(
                name, pp=pp, pp_rank=pp_rank, chunks=chunks, num_micro_batches=num
            ):
                wait_s, messages_s = _priced(path, others, chunks, message_s)
                longest = max(longest, (own_s - passes.left(path) + wait_s, messages_s))
    # The busiest rank's own work is not waiting.
    busiest_s = num * max(rank.passes.total_s for rank in ranks)
    waits_s = max(0.0, longest[0] - busiest_s)
    messages_s = min(waits_s, longest[1])
    return waits_s - messages_s, messages_s


def _priced(path: Path, passes: Passes, chunks: int, message_s: float) -> tuple[float, float]:
    """Return the seconds of a path, and the part of them that is messages."""
    messages_s = path.messages * message_s
    return (passes.along(path) + messages_s) / chunks, messages_s / chunks


def _others(mean: Passes, mine: Passes, pp: int) -> Passes:
    """Return the mean passes of all ranks but one."""
    if pp == 1:
        return mean
    return Passes(
        *((pp * all_s - own_s) / (pp - 1) for all_s, own_s in zip(mean, mine, strict=True))
    )


@lru_cache(maxsize=4096)
def waiting_paths(name: str, *, pp: int, chunks: int, num_micro_batches: int) -> tuple[Path, ...]:
    """Return the paths that may be the longest in the order of schedule ``name``."""
    paths = _PATHS[name](pp - 1, chunks, num_micro_batches)
    return tuple(Path(*path) for path in paths)


_Paths = tuple[tuple[int, int, int, int], ...]


def _one_f_one_b(after: int, chunks: int, num: int) -> _Paths:
    """Return the path of 1F1B: pp - 1 passes of each kind.

    With chunks it has more, as many as the last round is short of for each other chunk: backwards,
    and forwards as well where it is the first round (Narayanan et al. 2021, section 2.2). In a
    round that is not full, without chunks, paths differ by the rank that most of them is on;
    :func:`own_paths` has these.
    """
    if chunks == 1:
        return ((after, after, after, _round_trips(after, num)),) if num > after + 1 else ()
    ragged = -num % (after + 1) * (chunks - 1)
    first = ragged if num <= after else 0
    messages = 2 * (after + (after + 1) * (chunks - 1))
    return ((after + first, after + ragged, after + ragged, messages),)


def _round_trips(after: int, num: int) -> int:
    """Return the number of messages on a path of 1F1B.

    A micro-batch waits until the one pp before it is back, after twice the length of the pipeline.
    """
    rounds, more = divmod(num - 1, after + 1)
    return 2 * (after * (1 + rounds) + max(0, more - 1))


def _gpipe(after: int, chunks: int, num: int) -> _Paths:
    """Return the path of GPipe, chunk by chunk.

    A round that is not full comes around before the next chunk can begin.
    """
    missing = max(0, after + 1 - num) * (chunks - 1)
    around = (after + 1) * (chunks - 1) if num <= after + 1 else 0
    return ((after + missing,) * 3 + (2 * (after + around),),)


def _zb_h1(after: int, _chunks: int, num: int) -> _Paths:
    """Return the paths of ZB-H1: F + B - W of pp - 1 ranks (Qi et al. 2023, table 1).

    Fewer weight gradients are deferred when there are fewer micro-batches. Those of a full round
    hide the messages of all later rounds.
    """
    put_off, messages = min(num - 1, after), _round_trips(after, min(num, after + 2))
    left = after - put_off
    return (
        (after, after, -put_off, messages),
        (left, after, 0, messages),
        (after, left, 0, messages),
    )


def _zb_h2(after: int, _chunks: int, num: int) -> _Paths:
    """Return the paths of ZB-H2, which defers twice as many weight gradients as ZB-H1.

    Ranks begin a forward after each other.
    """
    put_off = min(num - 1, 2 * after)
    half, odd = divmod(put_off, 2)
    return (
        (after, after, -put_off, 2 * after), (after, after - half - odd, 0, 2 * after - half),
        (after, after - half, -odd, 2 * after - half),
    )  # fmt: skip


def _zb_v(after: int, _chunks: int, num: int) -> _Paths:
    """Return the paths of ZB-V: down and up the vee, less what later micro-batches fill.

    The source is Qi et al. 2024.
    """
    ways = 4 * after
    # So few micro-batches never fill the vee.
    if num <= after + 1:
        down = 2 * after - (num - 1)
        return (2 * (after + 1 - num), 2 * after, 0, ways), (down, down, 0, ways)
    put_off = min(num - after - 1, after)
    left, late = after - put_off, max(0, put_off - 1)
    return (
        (0, 2 * after, -2 * put_off, ways), (0, max(after, 2 * left), 0, ways),
        (left, left, 0, ways), (0, after - late, late, ways), (after - late, 0, late, ways),
    )  # fmt: skip


def _dualpipe_v(after: int, _chunks: int, num: int) -> _Paths:
    """Return the paths of DualPipe-V, which defers weight gradients at the end alone."""
    ways, steady = 4 * after, 2 * max(0, min(num, after + 2) - 2)
    # So few micro-batches never fill the vee.
    if num <= after + 1:
        down = 2 * after - (num - 1)
        more = ways + steady
        return (2 * (after + 1 - num), 2 * after, after, more), (down, down, after, more)
    put_off = min(num - after - 2, after)
    left, fill = after - put_off, after - 2 * put_off
    return (
        (-1, 2 * after, fill, ways + steady), (after, left, left, ways), (after, after, fill, ways),
    )  # fmt: skip


def own_paths(
    name: str, *, pp: int, pp_rank: int, chunks: int, num_micro_batches: int
) -> tuple[Path, ...]:
    """Return the paths with all passes of ``pp_rank``, for a rank that is busier than the others.

    Such a rank waits for passes of the others alone.
    """
    if chunks > 1 and num_micro_batches < pp and name not in _OWN:
        return ()  # passes run in sequence; none waits for a rank's others
    if name in _ONE_AFTER_ANOTHER and chunks == 1:
        return _own_one_f_one_b(pp - 1, pp_rank, num_micro_batches)
    if name in _OWN:
        paths = _OWN[name](pp - 1, pp_rank, num_micro_batches)
        return tuple(Path(*path, sum(path[:2])) for path in paths)
    return tuple(
        path._replace(messages=min(path.messages, 2 * (pp - 1 + pp * (chunks - 1))))
        for path in waiting_paths(name, pp=pp, chunks=chunks, num_micro_batches=num_micro_batches)
    )


_ONE_AFTER_ANOTHER = ("1f1b", "interleaved")


def _own_one_f_one_b(after: int, rank: int, num: int) -> tuple[Path, ...]:
    """Return the paths of 1F1B with the passes of rank ``rank``.

    A path has all of them; or it leaves out forwards before the first micro-batch is back,
    backwards after the last one, or both. Later ranks pass the others on meanwhile.
    """
    early = min(num - 1, after - rank)
    both, ways = after + early, after
    if num > after + 1:
        ways = both if num > after - rank + 1 else after
    elif early:
        ways = _round_trips(after, num) // 2
    return (
        Path(rank, rank, rank, 2 * rank),
        Path(after, after, after, 2 * after, left_forwards=early),
        Path(after, after, after, 2 * after, left_backwards=early),
        Path(both, both, both, 2 * ways, left_forwards=early, left_backwards=early),
    )


_OwnPaths = tuple[tuple[int, int, int], ...]


def _own_zb_h1(after: int, rank: int, num: int) -> _OwnPaths:
    """Return the paths of ZB-H1 with the passes of rank ``rank``.

    One ends where the first backward comes back. The other follows it, where input gradients take
    longer than weight gradients.
    """
    late, further = max(rank, after + 1 - num), after - rank
    return (late, further, 0), (late, after, -min(rank, num - 1))


def _own_zb_h2(after: int, rank: int, num: int) -> _OwnPaths:
    """Return the paths of ZB-H2, where the first backward may be back before it is needed."""
    further, put_off = after - rank, min(2 * rank, num - 1)
    late = after + 1 - min(num, 2 * further + 1)
    return (rank, 0, 0), (rank, rank, -put_off), (late, further, 0), (late, after, -put_off)


def _own_zb_v(after: int, rank: int, num: int) -> _OwnPaths:
    """Return the paths of ZB-V with the passes of rank ``rank``.

    Few micro-batches go down the vee and up again. Later ones fill all but the rank's late start.
    On the first rank they also leave what is deferred until the second backward of the first
    micro-batch arrives.
    """
    if num <= after + 1:
        return ((*_own_vee(after, rank, num), 0),)
    put_off = min(num - after - 1, after)
    if rank == 0:
        return (2 * max(0, after - num // 2), 0, 0), (0, 0, min(put_off, max(0, after - 1)))
    return (rank, 0, 0), (rank, rank, -max(0, 2 * put_off - (after - rank)))


def _own_dualpipe_v(after: int, rank: int, num: int) -> _OwnPaths:
    """Return the paths of DualPipe-V, where no weight gradient is deferred before the end."""
    if num <= after + 1:
        few = (*_own_vee(after, rank, num), max(after + 1 - num, rank))
        down = 2 * after - (num - 1)
        return (few, (down, down, after)) if rank == 0 else (few,)
    put_off = min(num - after - 2, after)
    left = max(0, rank - put_off)
    return (rank, left, left), (rank, rank, rank - 2 * min(put_off, rank)), (0, after, -after)


def _own_vee(after: int, rank: int, num: int) -> tuple[int, int]:
    """Return the forwards and backwards that a rank waits for in a vee with few micro-batches.

    At most ``pp`` micro-batches are in it.
    """
    missing = after + 1 - num
    backwards = max(2 * missing, min(2 * rank, after + missing))
    if rank == after:
        return after + missing, backwards
    return max(rank, 2 * (after - num // 2) - rank), backwards


_OWN: dict[str, Callable[[int, int, int], _OwnPaths]] = {
    "zb_h1": _own_zb_h1,
    "zb_h2": _own_zb_h2,
    "zb_v": _own_zb_v,
    "dualpipe_v": _own_dualpipe_v,
}
_PATHS: dict[str, Callable[[int, int, int], _Paths]] = {
    "1f1b": _one_f_one_b,
    "interleaved": _one_f_one_b,
    "gpipe": _gpipe,
    "zb_h1": _zb_h1,
    "zb_h2": _zb_h2,
    "zb_v": _zb_v,
    "dualpipe_v": _dualpipe_v,
}
