"""Verification of a job: shrink it, train it on one rank and on sampled layouts, and compare.

`cli/verify.py` prints the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf

from raymega.config.schema import Job
from raymega.data.checks import training_faults
from raymega.errors import ConfigError, WorkerError
from raymega.plan.run_plan import job_values
from raymega.verify.compare import (
    LIMIT,
    LayoutComparison,
    RankResult,
    Reference,
    compare,
    make_reference,
)
from raymega.verify.launch import ForkServer, count_gpus, open_fork_server
from raymega.verify.layout import Device, Layout
from raymega.verify.layout_sampling import PairCoverage, draw_layouts, left_out, pair_coverage
from raymega.verify.legal_layouts import layouts_of_one_rank, own_layout, reference_layout
from raymega.verify.minimise import minimise
from raymega.verify.resume import resuming_pair, run_resumed
from raymega.verify.rounding import (
    Precision,
    Spread,
    compare_with_spread,
    in_precision,
    measure_spread,
    on_device,
)
from raymega.verify.shares import LayoutFailedError
from raymega.verify.shrink import Shrunk, shrink_job

NOT_RESUMED = (
    "checkpoints: one is saved and resumed where --steps is 2 or more, and --layouts has two grids"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options that set how thorough a verification is.

    Attributes:
        layouts: Number of layouts that are sampled.
        max_ranks: Largest number of ranks of a layout.
        seed: Seed of the sampling.
        steps: Number of optimizer steps that each layout trains.
        max_params: Largest number of parameters of the shrunk model.
        limit: Largest deviation that passes.
        timeout_s: Longest time of one layout in seconds.
        budget_s: Seconds after which no further layout starts; further sets of ``layouts`` are drawn until
            then. 0 draws one set.
        precision: Dtype of the layouts; below float64 they are compared with the spread of roundings.
        device: Device of the layouts. The run that they are compared with is the CPU's on either.
    """

    layouts: int = 8
    max_ranks: int = 8
    seed: int = 0
    steps: int = 3
    max_params: int = 2_000_000
    limit: float = LIMIT
    timeout_s: float = 120.0
    budget_s: float = 0.0
    precision: Precision = "float64"
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of one layout.

    ``comparison`` is None where its ranks failed. ``resumed_from`` is the layout that saved the checkpoint from
    which this one trained the last step.
    """

    layout: Layout
    comparison: LayoutComparison | None
    failure: str
    seconds: float
    resumed_from: Layout | None = None

    @property
    def is_same(self) -> bool:
        """True where the layout trained the same run as the reference."""
        return self.comparison is not None and self.comparison.first is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Verdict of a verification, with its evidence.

    ``left_out`` are option values and degrees that are possible and were not drawn; ``pairs`` tells the same of
    pairs. ``num_layouts`` counts those that trained from the first step. ``smallest`` is the smallest found to fail. ``router_margin`` is the least margin of a routing
    decision on one rank, infinite without experts: if it is below rounding errors, a layout may choose
    another expert. ``fp8_margin`` is the same for roundings to fp8. ``undecided`` weights may differ by
    noise, see Reference.
    """

    shrunk: Shrunk
    options: Options
    outcomes: tuple[Outcome, ...]
    left_out: tuple[str, ...]
    pairs: PairCoverage
    num_layouts: int
    smallest: Outcome | None
    router_margin: float
    undecided: tuple[str, ...]
    fp8_margin: float
    seconds: float

    @property
    def is_same(self) -> bool:
        """True where every layout trained the same run as the reference."""
        return all(outcome.is_same for outcome in self.outcomes)


class Watcher:
    """Callbacks of a verification's progress; this base class ignores them."""

    def on_start(self, shrunk: Shrunk, num_layouts: int) -> None:
        """Note the shrunk job, once, before the first process."""

    def on_reference(self) -> None:
        """Note that the run on one rank is done."""

    def on_layout(self, outcome: Outcome) -> None:
        """Note that a sampled layout is done."""

    def on_shrinking(self) -> None:
        """Note that a simpler layout runs next, after a failure."""


def verify_job(job: Job, options: Options, watcher: Watcher) -> Report:
    """Test that ``job`` trains the same run on sampled layouts, or find one where it does not.

    Raises:
        ConfigError: The job cannot be made small enough, or has no other layout.
        WorkerError: The run on one rank failed, so there is no reference.
    """
    began = time.monotonic()
    options = _for_device(options)
    alone: tuple[Layout, ...] = ()
    # shrink, and sample layouts
    shrunk = shrink_job(
        job,
        steps=options.steps,
        max_params=options.max_params,
        max_ranks=options.max_ranks,
        is_data_there=_is_data_there(job),
        seed=options.seed,
        device=options.device,
    )
    if options.device != "cpu":
        alone = layouts_of_one_rank(shrunk.job)
    # The shrunk job has a grid of one rank and a smaller micro-batch: take the grid from ``job``.
    own = own_layout(job, shrunk.job)
    draw = partial(
        draw_layouts, shrunk.job, own=own, count=options.layouts, max_ranks=options.max_ranks
    )
    first = draw(seed=options.seed)
    layouts = (*alone, *first.layouts)
    if not layouts:
        raise ConfigError(
            fact=f"no layout of 2 to {options.max_ranks} ranks could be drawn",
            rule="a proof compares at least one layout with one rank",
            remedy="use --layouts 1 or more and --max-ranks 2 or more",
        )
    if resuming_pair(layouts, options.steps) is None:
        shrunk = replace(shrunk, untested=(*shrunk.untested, NOT_RESUMED))
    watcher.on_start(shrunk, len(layouts))
    # train the reference, then each layout, and compare
    with open_fork_server(timeout_s=options.timeout_s) as fork_server:
        trial = _make_trial(fork_server, shrunk.job, options)
        watcher.on_reference()
        outcomes = [*_alone(trial, watcher), *_outcomes(trial, layouts, watcher)]
        # further draws, until the time is over
        possible = set(first.pairs)
        for seed in count(options.seed + 1):
            if time.monotonic() - began >= options.budget_s or not first.layouts:
                break
            further = draw(seed=seed)
            possible |= further.pairs
            drawn = [each for each in further.layouts if not _has(outcomes, each)]
            outcomes += _outcomes(trial, drawn, watcher, until_s=began + options.budget_s)
        # minimise a failure
        failed = [outcome for outcome in outcomes if not outcome.is_same]
        smallest = _find_smallest(trial, failed, watcher.on_shrinking) if failed else None
    reference, tried = trial.reference, [outcome.layout for outcome in outcomes]
    return Report(
        shrunk=shrunk,
        options=options,
        outcomes=tuple(outcomes),
        left_out=left_out(shrunk.job, tried, max_ranks=options.max_ranks),
        pairs=pair_coverage(shrunk.job, tried, possible),
        num_layouts=sum(each.resumed_from is None for each in outcomes)
        - (trial.spread is not None),
        smallest=smallest,
        router_margin=reference.router_margin,
        undecided=tuple(sorted(reference.undecided)),
        fp8_margin=reference.fp8_margin,
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """Runs of layouts with what they are compared with; ``spread`` is None in float64."""

    fork_server: ForkServer
    job: Job
    reference: Reference
    spread: Spread | None
    options: Options

    def run(self, layout: Layout) -> Outcome:
        """Train a layout and compare it; a failure of its ranks is part of the outcome."""
        return self._judge(layout, self.fork_server.run(self.job, layout, steps=self.options.steps))

    def resume(self, saved: Layout, resumed: Layout) -> Outcome:
        """Save a run on one layout, resume it on the other, and compare the step after that."""
        steps = self.options.steps
        results = run_resumed(self.fork_server, self.job, saved, resumed, steps=steps)
        return replace(self._judge(resumed, results), resumed_from=saved)

    def _judge(self, layout: Layout, results: AbstractContextManager[list[RankResult]]) -> Outcome:
        began, comparison, failure = time.monotonic(), None, ""
        try:
            with results as found:
                if self.spread is None:
                    comparison = compare(found, self.reference, limit=self.options.limit)
                else:
                    comparison = compare_with_spread(found, self.reference, self.spread)
        except LayoutFailedError as error:
            failure = str(error)
        return Outcome(
            layout=layout,
            comparison=comparison,
            failure=failure,
            seconds=time.monotonic() - began,
        )


def _for_device(options: Options) -> Options:
    """Return the options with no more ranks than this machine has devices.

    Raises:
        ConfigError: There is no GPU, and one is asked for.
    """
    if options.device == "cpu":
        return options
    num_gpus = count_gpus()
    if not num_gpus:
        raise ConfigError(
            fact="--device cuda, and torch finds no GPU on this machine",
            rule="each rank of a layout takes a GPU of its own",
            remedy="run it on a machine with a GPU, or leave out --device",
        )
    return replace(options, max_ranks=min(options.max_ranks, num_gpus))


def _make_trial(fork_server: ForkServer, job: Job, options: Options) -> _Trial:
    """Train the reference, and below float64 the runs on one rank that show the spread of roundings."""
    spread = None
    try:
        with fork_server.run(job, reference_layout(job), steps=options.steps) as results:
            reference = make_reference(results[0])
        if options.precision != "float64":
            job = in_precision(job, options.precision)
            spread = measure_spread(fork_server, job, reference, steps=options.steps)
        # the reference, and the spread, are the CPU's: another device is held to them
        job = on_device(job, options.device)
    except LayoutFailedError as error:
        raise WorkerError(
            fact=f"the run on one rank failed: {error}",
            rule="every layout is compared with it",
            remedy="make the job train on one rank first",
        ) from error
    return _Trial(
        fork_server=fork_server, job=job, reference=reference, spread=spread, options=options
    )


def _outcomes(
    trial: _Trial, layouts: Sequence[Layout], watcher: Watcher, *, until_s: float = inf
) -> Iterator[Outcome]:
    """Yield the outcome of each layout, then that of a run saved on one and resumed on another grid."""
    for layout in layouts:
        if time.monotonic() >= until_s:
            return
        outcome = trial.run(layout)
        watcher.on_layout(outcome)
        yield outcome
    pair = resuming_pair(layouts, trial.options.steps)
    if pair is not None and time.monotonic() < until_s:
        outcome = trial.resume(*pair)
        watcher.on_layout(outcome)
        yield outcome


def _alone(trial: _Trial, watcher: Watcher) -> Iterator[Outcome]:
    """Yield the outcome of the runs on one rank that show the spread, below float64."""
    if trial.spread is None:
        return
    found = trial.spread.judge(trial.options.precision, step=trial.options.steps)
    outcome = Outcome(
        layout=reference_layout(trial.job),
        comparison=found,
        failure="",
        seconds=trial.spread.seconds,
    )
    watcher.on_layout(outcome)
    yield outcome


def _has(outcomes: Sequence[Outcome], layout: Layout) -> bool:
    return any(outcome.layout == layout for outcome in outcomes)


def _find_smallest(
    trial: _Trial, failed: list[Outcome], on_shrinking: Callable[[], None]
) -> Outcome:
    """Minimise the failed layout that has the fewest ranks; a resumed run only if nothing else failed."""
    plain = [outcome for outcome in failed if outcome.resumed_from is None]
    start = min(plain or failed, key=lambda outcome: outcome.layout.world_size)
    if start.resumed_from is not None or start.layout.world_size == 1:
        return start
    seen = {start.layout: start}

    def is_failing(layout: Layout) -> bool:
        on_shrinking()
        seen[layout] = trial.run(layout)
        return not seen[layout].is_same

    return seen[minimise(trial.job, start.layout, is_failing)]


def _is_data_there(job: Job) -> bool:
    # a few steps make no epochs
    return not training_faults(job_values(job) | {"run.steps": 0})
