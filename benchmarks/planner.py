"""Predicted against published: how wrong the planner is on sources that its constants were not fitted to.

    python -m benchmarks.planner                # errors by source, with the constants as shipped
    python -m benchmarks.planner --rows         # each run as well
    python -m benchmarks.planner --leave-out    # fit anew, and once more without each source; bands
    python -m benchmarks.planner --speed        # layouts that a search looks at in a minute

Tables are all benchmarks/published_*.csv, or those given. A source is its publisher: all tables of one
publisher are left out at once.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
from scipy.stats import spearmanr

from raymega.api import load_job
from raymega.plan.hardware.catalog import CATALOGUE, Fitted
from raymega.planner.calibration.comparison import PublishedComparison, compare
from raymega.planner.calibration.error_band import BANDS, TimeBand
from raymega.planner.calibration.published_runs import PublishedRun, read_runs
from raymega.planner.search.search import search

HERE = Path(__file__).parent
JOBS = HERE.parent / "jobs"
FAMILIES = {
    "a100": ("a100",),
    "h100": ("h100", "h100-96gb"),
    "b200": ("b200", "gb200", "b300", "gb300"),
}
"""Devices that share constants."""
SPREADS = {
    "matmul_share": 0.15, "matmul_8_bit_share": 0.2, "matmul_4_bit_share": 0.3, "link_share": 0.15,
    "network_share": 0.1, "attention_share": 0.2, "older_attention_share": 0.15, "memory_share": 0.3,
    "launch_s": 0.5, "matmul_depth": 0.5, "matmul_waves": 0.4,
}  # fmt: skip
"""Constants to fit, with the expected distance from their start, as a logarithm."""
BEFORE = {
    "matmul_share": 0.7, "matmul_8_bit_share": 0.62, "matmul_4_bit_share": 0.45, "link_share": 0.8,
    "network_share": 0.8, "attention_share": 0.45, "older_attention_share": 0.35, "memory_share": 0.3,
    "launch_s": 4e-6, "matmul_depth": 80.0, "matmul_waves": 0.3,
}  # fmt: skip
"""Round figures that every fit starts from and is held near, the same for all devices: constants that
have seen a source would tell a fit without it what it must not know."""
TYPICAL = 0.12
"""Log error of a row from which it counts for less: a system that does something else."""
ROUNDS, STEP, MOST = 3, 0.03, 0.35
STATED, HELD = 0.8, 0.85
"""Share that a band states, and that it holds of sources left out. Other sources may lie further off."""
CLOSE = np.log(1.25)
SEARCHES = (
    ("llama-7b-16gpu.yaml", 16, ()),
    ("llama-70b-512gpu.yaml", 512, ()),
    ("llama-70b-512gpu.yaml", 512, ("data.seq_len=131072", "model.max_positions=131072")),
    ("mixtral-8x7b-64gpu.yaml", 64, ()),
)
Errors = np.ndarray


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rows", action="store_true", help="each run beside its source's figures")
    args = parser.parse_args()
    if args.speed:
        speed()
        return
    tables = args.runs or sorted(HERE.glob("published_*.csv"))
    rows = [run for table in tables for run in read_runs(table)]
    runs = [run for run in rows if not run.skipped and run.iter_s]
    print(f"{len(rows)} rows, {sum(bool(run.skipped) for run in rows)} skipped")
    shipped = [compare(run) for run in runs]
    report("constants as shipped", shipped, errors(runs), is_each_shown=args.rows)
    _report_memory(rows)
    if args.leave_out:
        leave_out(runs, shipped)


def publisher(source: str) -> str:
    """Return who published a source, which may have several tables."""
    return source.split()[0].split("-SC21")[0]


def errors(runs: Sequence[PublishedRun], fitted: Fitted | None = None) -> Errors:
    """Return the logarithm of the predicted over the published seconds."""
    return np.log([compare(run, fitted).iter_s / run.iter_s for run in runs])


def narrowed(found: PublishedComparison) -> PublishedRun:
    """Return the run with the plans that its prediction is made of alone, which saves a fit time."""
    job = found.plan.job
    kept = [
        plan
        for plan in found.run.candidates
        if plan.job.schedule == job.schedule and plan.job.parallel.sharding == job.parallel.sharding
    ]
    return replace(found.run, candidates=tuple(kept))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Constants of a family of devices, fitted to all runs, and errors without each source."""

    constants: Fitted
    left_out: Errors


def fit(runs: Sequence[PublishedRun], start: Fitted) -> Fit:
    """Fit the constants by damped least squares of log errors, robust against rows that are far off.

    Every publisher counts as the root of its number of rows. Fits without a publisher are solved with
    the slopes of the whole fit, as predictions are nearly linear in the logarithms of constants.
    """
    # a constant of zero is a unit that the device lacks
    names = [name for name in SPREADS if getattr(start, name)]
    spread = np.array([SPREADS[name] for name in names])
    origin = np.log([BEFORE[name] for name in names])
    # many rows of one publisher repeat its habits: they count as the root of their number
    sources = np.array([publisher(run.source) for run in runs])
    weights = np.array([np.sum(sources == source) ** -0.5 for source in sources])

    def at(point: np.ndarray) -> Fitted:
        values = zip(names, map(float, np.exp(point)), strict=True)
        # shares of a peak stay below it
        return replace(start, **{k: min(0.95, v) if "share" in k else v for k, v in values})

    def solved(slopes: np.ndarray, here: Errors, counts: np.ndarray) -> np.ndarray:
        """Return the step to the least squares, where far rows have little weight."""
        step = np.zeros(len(names))
        for _ in range(15):
            off = here + slopes @ step
            # robust weights anew in each turn, and the start as a prior of width ``spread``
            each = counts / (1 + (off / TYPICAL) ** 2) / TYPICAL**2
            normal = slopes.T @ (each[:, None] * slopes) + np.diag(spread**-2.0)
            step = np.linalg.solve(normal, -slopes.T @ (each * here) - (point - origin) / spread**2)
        return step

    point = origin
    for left in reversed(range(ROUNDS)):
        here = errors(runs, at(point))
        # slopes by differences: the model is arithmetic without derivatives
        ahead = [errors(runs, at(point + step)) for step in STEP * np.eye(len(names))]
        slopes = (np.array(ahead) - here).T / STEP
        if left:
            point = point + np.clip(solved(slopes, here, weights), -MOST, MOST)
    without = np.zeros(len(runs))
    for source in set(sources):
        mine = sources == source
        # solve again without the source, and move its own predictions by that step
        step = solved(slopes, here, np.where(mine, 0.0, weights))
        without[mine] = here[mine] + slopes[mine] @ step
    return Fit(constants=at(point), left_out=without)


def leave_out(runs: Sequence[PublishedRun], shipped: Sequence[PublishedComparison]) -> None:
    """Fit each family anew, and print errors and bands of sources that were left out."""
    without = np.zeros(len(runs))
    for family, devices in FAMILIES.items():
        places = [place for place, run in enumerate(runs) if run.gpu in devices]
        done = fit([narrowed(shipped[place]) for place in places], CATALOGUE[family].fitted)
        print(family, done.constants)
        without[places] = done.left_out
    others = [n for n, run in enumerate(runs) if not any(run.gpu in d for d in FAMILIES.values())]
    without[others] = errors([runs[place] for place in others])  # nothing is fitted to them
    report("each source left out", shipped, without)
    report_bands(shipped, without)


def report(
    title: str,
    found: Sequence[PublishedComparison],
    off: Errors,
    *,
    is_each_shown: bool = False,
) -> None:
    """Print errors by source and over all, with the share that the shipped bands hold."""
    print(f"\n{title}")
    head = ("runs", "median", "in 25 %", "worst", "in band", "rank")
    print(f"{'source':44} " + " ".join(f"{name:>7}" for name in head))
    by_source: dict[str, list[int]] = defaultdict(list)
    for place, each in enumerate(found):
        by_source[each.run.source].append(place)
    orders = []
    for source, places in by_source.items():
        order = _order([found[n].run.iter_s for n in places], off[places])
        # rank correlations of few runs say nothing
        orders += [order] if len(places) >= 4 else []
        print(
            f"{source.split(' (')[0][-44:]:44} " + _figures(found, off, places) + f" {order:7.3f}"
        )
        for n in places if is_each_shown else ():
            run = found[n].run
            print(
                f"    {run.model:40} {run.num_gpus:5} x {run.gpu:9} {run.iter_s:9.3f} s {np.expm1(off[n]):+7.1%}"
            )
    print(f"{'all':44} " + _figures(found, off, range(len(found))) + f" {median(orders):7.3f}")


def _figures(found: Sequence[PublishedComparison], off: Errors, places: Sequence[int]) -> str:
    size = np.abs(off[list(places)])
    held = np.mean([_holds(found[n].band, off[n]) for n in places])
    close = np.mean(size <= CLOSE)
    figures = (np.median(size), close, size.max(), held)
    return f"{len(places):7} " + " ".join(f"{figure:7.1%}" for figure in figures)


def _holds(band: TimeBand, off: float) -> bool:
    """Return whether a band around a prediction holds the published time."""
    return bool(band.low <= np.exp(-off) <= band.high)


def _order(published: Sequence[float], off: Errors) -> float:
    if len(published) < 3:
        return float("nan")
    return float(spearmanr(published, np.array(published) * np.exp(off)).statistic)


def report_bands(found: Sequence[PublishedComparison], off: Errors) -> None:
    """Print the bands that the errors give, and what bands of other sources hold of one left out."""
    print(f"\nbands of {STATED:.0%}, and what those of all other sources hold of a source left out")
    sources = np.array([publisher(each.run.source) for each in found])
    held = np.zeros(len(found), dtype=bool)
    for name in ("dense", "experts"):
        mine = np.flatnonzero([each.band is BANDS[name] for each in found])
        widths = np.arange(1.0, 3.0, 0.05)
        shares = [_held(off[mine], sources[mine], width).mean() for width in widths]
        # the narrowest factor at which bands of the other sources hold enough of each
        width = float(widths[int(np.argmax(np.array(shares) >= HELD))])
        held[mine] = _held(off[mine], sources[mine], width)
        for source in sorted(set(sources[mine])):
            of_it = mine[sources[mine] == source]
            print(f"  {name:10} {source:22} {len(of_it):4} runs, {held[of_it].mean():.0%} held")
        low, high = np.exp(width * _limits(off[mine], sources[mine]))
        print(
            f"{name}: low={low:.2f}, high={high:.2f}, limits times {width:.2f}; "
            f"{held[mine].mean():.1%} of {len(mine)} held"
        )
    borrowed = np.flatnonzero([not each.band.is_measured for each in found])
    held[borrowed] = [_holds(found[n].band, off[n]) for n in borrowed]
    print(f"borrowed, as shipped: {held[borrowed].mean():.1%} of {len(borrowed)} held")
    print(f"all: {held.mean():.1%} of {len(held)} held")


def _held(off: Errors, sources: np.ndarray, width: float) -> np.ndarray:
    """Return which rows the limits of all other sources hold, ``width`` times as wide."""
    held = np.zeros(len(off), dtype=bool)
    for source in set(sources):
        mine = sources == source
        low, high = width * _limits(off[~mine], sources[~mine])
        held[mine] = (low <= -off[mine]) & (-off[mine] <= high)
    return held


def _limits(off: Errors, sources: np.ndarray) -> np.ndarray:
    """Return the logarithms of real over predicted time that one row in ten is below, and above.

    Every publisher counts the same, however many rows it has.
    """
    weights = np.array([1 / np.sum(sources == source) for source in sources])
    order = np.argsort(-off)
    # weighted quantiles, each row in the middle of its weight
    share = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return np.interp(((1 - STATED) / 2, (1 + STATED) / 2), share, -off[order])


def _report_memory(rows: Sequence[PublishedRun]) -> None:
    found = [compare(run) for run in rows if not run.skipped]
    printed = [each for each in found if each.run.memory_gib]
    off = [abs(each.memory_gib / each.run.memory_gib - 1) for each in printed]
    print(
        f"\nmemory of {len(printed)} runs that print what was allocated: median {median(off):.1%}, "
        f"worst {max(off):.1%}, {sum(size <= 0.1 for size in off)} within 10 %"
    )
    # two kinds of error: runs that worked are ruled out, runs that failed are allowed
    ran = [each for each in found if not each.run.is_out_of_memory]
    failed = [each for each in found if each.run.is_out_of_memory]
    print(
        f"{sum(not each.fits for each in ran)} of {len(ran)} that ran are ruled out for their memory, "
        f"{sum(not each.fits for each in failed)} of {len(failed)} that did not fit"
    )


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of the process that ``work`` takes on one core."""
    begin = process_time()
    work()
    return process_time() - begin


def speed() -> None:
    """Seconds of the process on one core, and layouts a minute; the median of five searches."""
    print(f"{'search':28} {'layouts':>8} {'seconds':>8} {'a minute':>10}")
    for name, num_devices, overrides in SEARCHES:
        job = load_job(JOBS / name, overrides)
        once = partial(search, job, CATALOGUE["h100"], num_devices=num_devices, top=1)
        tried = 1 + sum(once().refused.values())
        taken = median(timed(once) for _ in range(5))
        print(f"{name[:20]:20} {num_devices:7} {tried:8,} {taken:8.2f} {60 * tried / taken:10,.0f}")


if __name__ == "__main__":
    main()
