"""Planted mistakes in what a planner expects of schedules and ranks, and what each of them then gets wrong.

`tests.mutations.outcomes` calls `outcome` with each of them planted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PlanMutation:
    """A row: ``old`` in the package's ``file`` becomes ``new``; ``caught`` is what is wrong then."""

    name: str
    file: str
    old: str
    new: str
    caught: str


FILL = "planner/cost/pipeline_bubble_time.py"
PLAN_MUTATIONS = (
    PlanMutation(
        name="a last round of chunks that is not full costs nothing",
        file=FILL,
        old="ragged = -num % (after + 1) * (chunks - 1)",
        new="ragged = 0",
        caught="1f1b with 2 chunks takes another time than is told",
    ),
    PlanMutation(
        name="messages are waited for once a step",
        file=FILL,
        old="return 2 * (after * (1 + rounds) + max(0, more - 1))",
        new="return 2 * after",
        caught="messages of 1f1b are not those of its longest path",
    ),
    PlanMutation(
        name="what is waited for goes through all of a slow rank",
        file=FILL,
        old="left_forwards=early, left_backwards=early",
        new="left_forwards=0, left_backwards=0",
        caught="1f1b with 1 chunks takes another time than is told",
    ),
    PlanMutation(
        name="gpipe's chunks come back at once",
        file=FILL,
        old="missing = max(0, after + 1 - num) * (chunks - 1)",
        new="missing = 0",
        caught="gpipe with 3 chunks takes another time than is told",
    ),
    PlanMutation(
        name="zb_h1 puts no weight parts off",
        file=FILL,
        old="put_off, messages = min(num - 1, after), _round_trips",
        new="put_off, messages = 0, _round_trips",
        caught="zb_h1 with 1 chunks takes another time than is told",
    ),
    PlanMutation(
        name="zb_h2 puts no more off than zb_h1",
        file=FILL,
        old="put_off = min(num - 1, 2 * after)\n",
        new="put_off = min(num - 1, after)\n",
        caught="zb_h2 with 1 chunks takes another time than is told",
    ),
    PlanMutation(
        name="zb_v fills its vee from the first micro-batch on",
        file=FILL,
        old="return (2 * (after + 1 - num), 2 * after, 0, ways), (down, down, 0, ways)",
        new="return ((down, down, 0, ways),)",
        caught="zb_v with 2 chunks takes another time than is told",
    ),
    PlanMutation(
        name="dualpipe_v fills its vee with weight parts from the first micro-batch on",
        file=FILL,
        old="return (2 * (after + 1 - num), 2 * after, after, more), (down, down, after, more)",
        new="return (2 * (after + 1 - num), 2 * after, 0, more), (down, down, 0, more)",
        caught="dualpipe_v with 2 chunks takes another time than is told",
    ),
    PlanMutation(
        name="a slow rank is one of the others that it waits for",
        file=FILL,
        old="others, own_s = _others(mean, passes, pp), num * passes.total_s",
        new="others, own_s = passes, num * passes.total_s",
        caught="a slow rank of 1f1b delays others otherwise",
    ),
    PlanMutation(
        name="a slow rank of zb_h1 is waited for by nobody",
        file=FILL,
        old="return (late, further, 0), (late, after, -min(rank, num - 1))",
        new="return ((0, 0, 0),)",
        caught="a slow rank of zb_h1 delays others otherwise",
    ),
    PlanMutation(
        name="a slow rank of zb_v is waited for by nobody",
        file=FILL,
        old="return (rank, 0, 0), (rank, rank, -max(0, 2 * put_off - (after - rank)))",
        new="return ((0, 0, 0),)",
        caught="a slow rank of zb_v delays others otherwise",
    ),
    PlanMutation(
        name="a system that hides no message waits for few of them",
        file="planner/cost/step_time.py",
        old="mean, sent_s, still_s = mean.plus(longer), 0.0, num * longer.total_s",
        new="mean, sent_s, still_s = mean.plus(longer), 0.0, longer.total_s",
        caught="who stands still while sending is as fast as who does not",
    ),
    PlanMutation(
        name="a system that does not wait for an update is taken to",
        file="planner/cost/step_time.py",
        old="bubble_s = max(0.0, bubble_s - (pp - 1) * mean.forward_s / chunks)",
        new="pass",
        caught="a late start is paid for in each step",
    ),
    PlanMutation(
        name="a schedule is not tried",
        file="planner/search/candidates.py",
        old='ORDERS = ("1f1b", "zb_h1", "zb_h2", "zb_v",',
        new='ORDERS = ("1f1b", "zb_h1", "zb_h2",',
        caught="zb_v is not tried",
    ),
    PlanMutation(
        name="more is exchanged than evens two ranks out",
        file="plan/packing/rebalance.py",
        old="off = abs(moved - gap / 2)",
        new="off = abs(moved - gap)",
        caught="ranks that could end together do not",
    ),
    PlanMutation(
        name="a document goes where it has no room",
        file="plan/packing/rebalance.py",
        old="return target.tokens + more <= self._room and source.tokens - more <= self._room",
        new="return True",
        caught="a pack holds more tokens than it may",
    ),
    PlanMutation(
        name="an exchange that helps nobody stays",
        file="plan/packing/rebalance.py",
        old="if max(ends) >= before:",
        new="if False:",
        caught="a rank ends later than before",
    ),
)  # fmt: skip


def outcome(_folder: Path) -> str:
    """The first thing that the planner of this package gets wrong, or that it is sound."""
    for part in (_orders, _messages, _slow_ranks, _systems, _space, _even_ranks):
        for wrong in part():
            return wrong
    return "sound"


def _is_off(told: float, played: float, share: float) -> bool:
    return abs(told / played - 1) > share


def _orders() -> Iterator[str]:
    from raymega.schedule.simulate import Durations
    from tests.unit.planner.cost import test_pipeline_bubble_time as stage

    usual = Durations(forward=1.0, backward=2.0, weight=0.8)
    for name, chunks in stage.ORDERS:
        for num in (1, 2, 3, 4, 5, 6, 8, 12):
            told = stage.closed(name, chunks, 4, num, passes=(1.0, 1.2, 0.8))
            if _is_off(told, stage.played(name, chunks, 4, num, usual), 0.01):
                yield f"{name} with {chunks} chunks takes another time than is told"


def _messages() -> Iterator[str]:
    from raymega.schedule.simulate import Durations
    from tests.unit.planner.cost import test_pipeline_bubble_time as stage

    sent = Durations(forward=1.0, backward=2.0, weight=0.8, transfer=0.05)
    for name in ("1f1b", "gpipe", "zb_h1", "zb_h2"):
        told = stage.closed(name, 1, 4, 12, passes=(1.0, 1.2, 0.8), message_s=0.05)
        if _is_off(told, stage.played(name, 1, 4, 12, sent), 2e-3):
            yield f"messages of {name} are not those of its longest path"


def _slow_ranks() -> Iterator[str]:
    from raymega.schedule.simulate import Durations
    from tests.unit.planner.cost import test_pipeline_bubble_time as stage

    usual = Durations(forward=1.0, backward=2.0, weight=0.8)
    for name, chunks in stage.ORDERS:
        for rank in (0, 2, 3) if chunks == 1 or name in ("zb_v", "dualpipe_v") else ():
            for num in (2, 4, 6, 16):
                slow = stage.Uneven(usual, rank, 1.3)
                told = stage.closed(name, chunks, 4, num, passes=(1, 1.2, 0.8), slow=(rank, 1.3))
                if _is_off(told, stage.played(name, chunks, 4, num, slow), 0.06):
                    yield f"a slow rank of {name} delays others otherwise"


def _systems() -> Iterator[str]:
    from raymega.planner.cost.step_time import step_time
    from raymega.planner.kernels.system_traits import RAYMEGA
    from tests.unit.planner.cost.test_simulated_step import H100, piped

    slow = replace(H100, link_bytes_per_s=H100.link_bytes_per_s / 50)
    plan = piped(**{"parallel.pp": 4, "schedule.name": "zb_h2", "data.global_batch_size": 32})
    still = step_time(plan, slow, replace(RAYMEGA, hides_messages=False))
    if still.pipeline_s < 1.02 * step_time(plan, slow).pipeline_s:
        yield "who stands still while sending is as fast as who does not"
    goes_on = step_time(plan, H100, replace(RAYMEGA, waits_for_update=False))
    if goes_on.bubble_s > 0.2 * step_time(plan, H100).bubble_s:
        yield "a late start is paid for in each step"


def _space() -> Iterator[str]:
    from raymega.planner.search.candidates import Space, candidates
    from raymega.schedule.table import SCHEDULES
    from tests.unit.planner.cost.test_simulated_step import H100, piped

    job = piped(**{"parallel.pp": 2, "data.global_batch_size": 32}).job
    tried = {each.schedule.name for each in candidates(Space(job=job, device=H100, num_devices=8))}
    for name in sorted(set(SCHEDULES) - tried - {"interleaved", "zb_auto"}):
        yield f"{name} is not tried"


def _even_ranks() -> Iterator[str]:
    from tests.unit.plan.packing.test_rebalance import Rebalancer, _seconds

    def evened(starts: list[float], held: list, lengths: list[int], seconds=_seconds) -> list:
        return Rebalancer(starts, held, lengths, room=100, seconds=seconds).run()

    six = [[list(range(6))], [list(range(6, 12))]]
    if [len(pack) for (pack,) in evened([40.0, 0.0], six, [10] * 12)] != [4, 8]:
        yield "ranks that could end together do not"
    if len(evened([40.0, 0.0], [[[0, 1]], [[2]]], [50, 50, 60])[1][0]) > 1:
        yield "a pack holds more tokens than it may"
    uneven = [[[0, 1]], [[2, 3]]]

    def in_tens(tokens: int, _pairs: int) -> float:
        return tokens / 10 + 10 * -(-tokens // 10)

    if evened([0.0, 0.0], uneven, [5, 6, 9, 1], in_tens) != uneven:
        yield "a rank ends later than before"
