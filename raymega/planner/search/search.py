"""Find the layouts on which a job runs fastest on a given number of devices.

The search tries every legal choice of degrees, chunks, micro-batch size, recompute and sharding,
and discards what does not fit into memory. It ranks the rest by the closed forms of
``raymega.planner.cost.step_time``, and simulates the schedules of the best few. It measures
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from operator import itemgetter

from raymega.config.schema import Job
from raymega.errors import Fault, PlanError
from raymega.plan.grid import Grid
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.state_bytes import StateSize, state_of
from raymega.plan.run_plan import RunPlan, job_values, plan_of_legal, with_options
from raymega.plan.validation.cache import RuleMemo
from raymega.plan.validation.grid import MOST_RANKS
from raymega.planner.cost.block_times import BlockTimes, block_times
from raymega.planner.cost.peak_memory import RESERVED_BYTES, MemoryUse, memory_use
from raymega.planner.cost.rank_classes import RankClass, rank_kinds
from raymega.planner.cost.simulated_step import played_step
from raymega.planner.cost.stage_cost import StageCosts
from raymega.planner.cost.step_time import PrecomputedCosts, StepTime, step_time
from raymega.planner.kernels.system_traits import RAYMEGA
from raymega.planner.search.candidates import SHARDINGS, VARIED, Space, candidates


def anywhere(_grid: Grid) -> bool:
    """Return True: the nodes can hold any grid."""
    return True


MEMORY_MARGIN = 0.08
"""Share of a device's memory that a chosen layout leaves free, for what no prediction of memory has:
fragments of the allocator, buffers of communicators, and the error of the prediction itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedLayout:
    """Layout that fits into memory, with its predicted time and memory."""

    plan: RunPlan
    time: StepTime
    memory: MemoryUse

    def overrides(self, job: Job) -> tuple[str, ...]:
        """Return the ``--set`` arguments that turn ``job`` into this layout."""
        mine, theirs = job_values(self.plan.job), job_values(job)
        return tuple(
            f"{path}={_as_yaml(value)}" for path, value in mine.items() if value != theirs[path]
        )

    def played(self, device: Accelerator) -> RankedLayout:
        """Return the layout with the step time of its simulated schedule."""
        return replace(self, time=played_step(self.plan, device))

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one device."""
        job = self.plan.job
        tokens = self.plan.batch.global_batch_size * job.data.seq_len
        return tokens / self.time.total_s / self.plan.grid.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """Fastest layout of each grid, and what ruled out the others.

    Attributes:
        best: Layouts, one for each grid, the fastest first.
        refused: Number of other layouts, by the reason that ruled them out.
        missed: Layout that needs the least memory of those that only memory ruled out and that are
            faster than ``best``; None without any.
    """

    best: tuple[RankedLayout, ...]
    refused: Counter[str]
    missed: RankedLayout | None


def search(
    job: Job,
    device: Accelerator,
    *,
    num_devices: int,
    top: int,
    fixed: frozenset[str] = frozenset(),
    margin: float = MEMORY_MARGIN,
) -> SearchResult:
    """Return the fastest layout of each of the ``top`` fastest grids on ``num_devices``.

    Layouts that leave less than ``margin`` of the memory free are taken only where no other fits.

    Args:
        job: Job to lay out; ``raymega.planner.search.candidates.CHOSEN`` lists the fields that are
            set.
        device: Accelerator of every rank.
        num_devices: Number of ranks.
        top: Most grids to return.
        fixed: Dotted paths of the fields that keep the job's values.
        margin: Share of a device's memory that a layout leaves free.

    Raises:
        PlanError: No legal layout has this number of ranks, or none fits into memory.
    """
    _check_number(num_devices)
    found: list[RankedLayout] = []
    refused: Counter[str] = Counter()
    limit = (1 - margin) * device.memory_bytes
    judge = Judge(device, limit)
    space = Space(job=job, device=device, num_devices=num_devices, fixed=fixed)
    # Price every candidate.
    for candidate in candidates(space):
        verdict = judge.verdict(candidate)
        if isinstance(verdict, str):
            refused[verdict] += 1
        else:
            found.append(verdict)
    if not found:  # the margin is given up before the job is
        found = [each for each in judge.missed if each.memory.total_bytes <= device.memory_bytes]
        refused[DOES_NOT_FIT] -= len(found)
        limit = device.memory_bytes
        judge.missed = [each for each in judge.missed if each.memory.total_bytes > limit]
    if not found:
        raise PlanError(_nothing_fits(space, refused))
    # Keep the fastest layout of each grid.
    by_grid: dict[str, RankedLayout] = {}
    for each in sorted(found, key=lambda each: each.time.total_s):
        by_grid.setdefault(each.plan.grid.describe(), each)
    # Simulate the schedules of the fastest few, which may change their order.
    few = [each.played(device) for each in list(by_grid.values())[: top + MORE]]
    best = sorted(few, key=lambda each: each.time.total_s)[:top]
    refused["fit, and are slower"] = len(found) - len(best)
    # Find what more memory would allow.
    fastest = next(iter(by_grid.values())).time.total_s
    faster = [each for each in judge.missed if each.time.total_s < fastest]
    least = min(faster, key=lambda each: each.memory.total_bytes, default=None)
    missed = least and least.played(device)
    if missed and missed.time.total_s >= best[0].time.total_s:  # not when simulated
        missed = None
    return SearchResult(best=tuple(best), refused=refused, missed=missed)


def fastest(
    job: Job,
    device: Accelerator,
    *,
    num_devices: int,
    top: int,
    fixed: frozenset[str] = frozenset(),
    fits: Callable[[Grid], bool] = anywhere,
) -> RankedLayout | None:
    """Return the best layout of :func:`search` on a grid that ``fits``; None where no grid of its best does.

    What ruled out others is not counted. Each layout has a least time at once, that of its busiest rank: those that
    cannot be among the best are not priced, which takes a fraction of the time.

    Raises:
        PlanError: No legal layout has this number of ranks, or none fits into memory.
    """
    judge = Judge(device, (1 - MEMORY_MARGIN) * device.memory_bytes)
    space = Space(job=job, device=device, num_devices=num_devices, fixed=fixed)
    drafts = [
        (least_s, place, candidate)
        for place, candidate in enumerate(candidates(space))
        if (least_s := judge.least_s(candidate)) < inf
    ]
    # The order by least times lets the loop end early: no later layout can be faster than its least time.
    by_grid: dict[str, tuple[float, int, RankedLayout]] = {}
    for least_s, place, candidate in sorted(drafts, key=itemgetter(0, 1)):
        slowest = sorted(total_s for total_s, _, _ in by_grid.values())[top + MORE - 1 :]
        if slowest and least_s > slowest[0] * (1 + ROUNDING):
            break
        grid = judge.grid_name(candidate)
        if grid in by_grid and least_s > by_grid[grid][0] * (1 + ROUNDING):
            continue
        found = judge.fitting(candidate)
        if found is not None:
            # of equally fast ones the first candidate is taken, as in a search
            mine = (found.time.total_s, place, found)
            by_grid[grid] = min(mine, by_grid.get(grid, mine), key=itemgetter(0, 1))
    few = [found for _, _, found in sorted(by_grid.values(), key=itemgetter(0, 1))[: top + MORE]]
    # Where no layout leaves the margin, the whole search gives it up.
    if not few:
        few = list(search(job, device, num_devices=num_devices, top=top, fixed=fixed).best)
    return _best_played([each for each in few if fits(each.plan.grid)], device)


def _best_played(few: Sequence[RankedLayout], device: Accelerator) -> RankedLayout | None:
    """Return the layout whose simulated schedule is the fastest; of equal ones the first."""
    best: RankedLayout | None = None
    for each in few:
        # whatever a simulation finds of waiting, the passes themselves take this long
        least_s = each.time.total_s - each.time.messages_s - each.time.bubble_s
        if best is not None and least_s > best.time.total_s * (1 + ROUNDING):
            continue
        played = each.played(device)
        if best is None or played.time.total_s < best.time.total_s:
            best = played
    return best


ROUNDING = 1e-9
"""Largest relative rounding error of a sum of times."""
MORE = 3
"""Number of grids, beyond those asked for, whose schedules are simulated as well."""
BREAKS_A_RULE = "breaks a rule of the job"
DOES_NOT_FIT = "does not fit into memory"
DENSE = ("tp", "cp", "pp", "dp")
"""Axes whose product is the number of ranks."""
FAR_ABOVE = 2.0
"""Multiple of the device's memory above which the speed of a layout is not computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shared:
    """Facts that all layouts with the same degrees, chunks and order have in common."""

    plan: RunPlan
    ranks: tuple[RankClass, ...]
    least_bytes: int
    least_of_a_rank: int
    grid_name: str


class Judge:
    """Evaluator of candidates: it checks the cheapest refusal first and computes shared parts once."""

    def __init__(self, device: Accelerator, limit_bytes: float) -> None:
        self.missed: list[RankedLayout] = []
        self._device, self._limit_bytes = device, limit_bytes
        self._rules = RuleMemo(VARIED)
        self._states: dict[tuple[object, ...], StateSize] = {}
        self._shared: dict[tuple[object, ...], _Shared | None] = {}
        self._blocks: dict[tuple[object, ...], BlockTimes] = {}
        self._costs: dict[tuple[object, ...], StageCosts] = {}
        self._least_s: dict[tuple[int, int], float] = {}
        self._too_large: set[tuple[int, int]] = set()

    def verdict(self, job: Job) -> RankedLayout | str:
        """Return the prediction for ``job``, or the reason that rules it out."""
        # Check rules, then the least memory, then memory and time.
        shared = self._share(job)
        if shared is None or not self._rules.is_legal(job):
            return BREAKS_A_RULE
        most = FAR_ABOVE * self._device.memory_bytes
        if shared.least_bytes > most:
            return DOES_NOT_FIT
        plan, costs = with_options(shared.plan, job), self._costs_of(job)
        memory = memory_use(plan, shared.ranks, costs)
        if memory.total_bytes > most:
            return DOES_NOT_FIT
        known = PrecomputedCosts(costs=costs, ranks=shared.ranks)
        found = RankedLayout(
            plan=plan, time=step_time(plan, self._device, known=known), memory=memory
        )
        if memory.total_bytes > self._limit_bytes:
            self.missed.append(found)
            return DOES_NOT_FIT
        return found

    def least_s(self, job: Job) -> float:
        """Return seconds that no step of ``job`` is below: its busiest rank's passes; infinity where none is legal."""
        shared = self._share(job)
        if shared is None or shared.least_bytes > FAR_ABOVE * self._device.memory_bytes:
            return inf
        costs = self._costs_of(job)
        key = id(shared), id(costs)
        if key not in self._least_s:
            busiest_s = max(
                sum(costs.time(*each).total_s for each in zip(rank.kinds, rank.stages, strict=True))
                for rank in shared.ranks
            )
            batch = with_options(shared.plan, job).batch
            self._least_s[key] = batch.num_micro_batches * busiest_s
        return self._least_s[key]

    def fitting(self, job: Job) -> RankedLayout | None:
        """Return the prediction for ``job``; None where it breaks a rule or does not fit."""
        shared, costs = self._share(job), self._costs_of(job)
        key = id(shared), id(costs)
        if shared is None or key in self._too_large or not self._rules.is_legal(job):
            return None
        plan = with_options(shared.plan, job)
        memory = memory_use(plan, shared.ranks, costs, limit_bytes=self._limit_bytes)
        if memory.total_bytes > self._limit_bytes:
            # Activations that leave no room for the most sharded state need not be counted again. An update's
            # temporary bytes, which stand there where that is the fullest moment, are others on each level.
            states = (costs.state(plan.job, rank.elements, plan.grid) for rank in shared.ranks)
            of_update = max(state.update_bytes for state in states)
            most = memory.activation_bytes
            if most > of_update and most + shared.least_of_a_rank > self._limit_bytes:
                self._too_large.add(key)
            return None
        known = PrecomputedCosts(costs=costs, ranks=shared.ranks)
        return RankedLayout(
            plan=plan, time=step_time(plan, self._device, known=known), memory=memory
        )

    def grid_name(self, job: Job) -> str:
        """Return the name of a job's grid, which is legal."""
        shared = self._share(job)
        assert shared is not None, "the job has a least time"
        return shared.grid_name

    def _share(self, job: Job) -> _Shared | None:
        """Return what layouts with the job's degrees share, or None when no such layout is legal."""
        parallel, schedule = job.parallel, job.schedule
        degrees = parallel.tp, parallel.cp, parallel.pp, parallel.dp, parallel.ep, parallel.etp
        key = (*degrees, parallel.cp_method, schedule.chunks, schedule.name)
        if key not in self._shared:
            if not self._rules.is_legal(job):
                self._shared[key] = None
            else:
                plan = plan_of_legal(job)
                ranks = rank_kinds(plan)
                fullest, emptiest = _least(plan, ranks)
                self._shared[key] = _Shared(
                    plan=plan,
                    ranks=ranks,
                    least_bytes=fullest,
                    least_of_a_rank=emptiest,
                    grid_name=plan.grid.describe(),
                )
        return self._shared[key]

    def _costs_of(self, job: Job) -> StageCosts:
        parallel = job.parallel
        cut = parallel.tp, parallel.cp, parallel.cp_method, parallel.ep, parallel.etp
        key = (*cut, parallel.sequence_parallel, job.schedule.micro_batch_size)
        whole = (*key, job.memory.recompute)
        if whole not in self._costs:
            shape = activation_shape(job)
            if key not in self._blocks:
                self._blocks[key] = block_times(shape, self._device, RAYMEGA)
            self._costs[whole] = StageCosts(shape, self._device, self._blocks[key], self._states)
        return self._costs[whole]


def _least(plan: RunPlan, ranks: Sequence[RankClass]) -> tuple[int, int]:
    """Return the bytes below which no sharding brings the state of the fullest rank, and of any."""
    most_cut = {"sharding": SHARDINGS[-1], "data_parallel_shard_degree": "all"}
    job = plan.job.with_values(parallel=most_cut)
    states = (state_of(job, rank.elements, plan.grid) for rank in ranks)
    # Gathered weights and passing gradients do not count: lower levels have none.
    sizes = [RESERVED_BYTES + each.total_bytes - each.passing_bytes for each in states]
    return max(sizes), min(sizes)


def _as_yaml(value: object) -> str:
    """Return ``value`` as YAML on one line, without spaces."""
    if isinstance(value, tuple):
        return f"[{','.join(map(_as_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_number(num_devices: int) -> None:
    """Raise if no plan lists that number of ranks; a search would only try its factors.

    Raises:
        PlanError: There are too many.
    """
    if num_devices > MOST_RANKS:
        raise PlanError(
            fact=f"a layout for {num_devices:,} workers",
            rule=f"a plan lists the ranks one by one, {MOST_RANKS:,} at most",
            remedy="use fewer, such as --gpus 4096, or cluster.num_workers=4096 in a job",
        )


def _nothing_fits(space: Space, refused: Counter[str]) -> Fault:
    job, device, num_devices = space.job, space.device, space.num_devices
    reasons = ", ".join(f"{count} {reason}" for reason, count in refused.most_common() if count)
    fact = f"{num_devices} x {device.name} for {job.run.name}: {reasons or 'no layout at all'}"
    held = {
        axis: getattr(job.parallel, axis) for axis in DENSE if f"parallel.{axis}" in space.fixed
    }
    if held and not reasons:
        stated = ", ".join(f"parallel.{axis}={degree}" for axis, degree in held.items())
        return Fault(
            fact=f"{fact} with {stated}",
            rule=f"tp * cp * pp * dp must be {num_devices}, and what the job states is kept",
            remedy=f"set cluster.num_workers={prod(held.values())}, or leave these degrees out of the job",
        )
    return Fault(
        fact=fact,
        rule=f"a rank has {device.memory_bytes / 2**30:.0f} GiB, and every rank a sequence at least",
        remedy="use more devices, a smaller model, or another data.global_batch_size",
    )
