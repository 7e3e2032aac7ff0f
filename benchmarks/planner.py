"""Predicted against published: how wrong the planner is on runs that its constants were not fitted to.

    python benchmarks/planner.py RUNS.csv          # errors by source, with the constants as shipped
    python benchmarks/planner.py RUNS.csv --fit    # fit them anew, and once more without each source
    python benchmarks/planner.py RUNS.csv --rows   # each run as well
    python benchmarks/planner.py --speed           # layouts that a search looks at in a minute

Constants are fitted by source: those in FITTED are seen, all others are not.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
from scipy.optimize import minimize
from scipy.stats import spearmanr

from raymega.api import load_job
from raymega.plan.hardware.catalog import CATALOGUE, Fitted
from raymega.planner.calibration.comparison import compare
from raymega.planner.calibration.published_runs import PublishedRun, read_runs
from raymega.planner.search.search import search

FITTED = {
    "a100": ("Narayanan2021-SC21-T1", "Korthikanti2022"),
    "h100": ("Megatron-LM README images/model_table",),
}
FREE = {
    "a100": (
        "matmul_share",
        "matmul_depth",
        "matmul_waves",
        "memory_share",
        "launch_s",
        "link_share",
    ),
    "h100": ("matmul_share", "matmul_waves", "memory_share", "launch_s"),
}
JOBS = Path(__file__).parents[1] / "jobs"
SEARCHES = (
    ("llama-7b-16gpu.yaml", 16, ()),
    ("llama-70b-512gpu.yaml", 512, ()),
    ("llama-70b-512gpu.yaml", 512, ("data.seq_len=131072", "model.max_positions=131072")),
    ("mixtral-8x7b-64gpu.yaml", 64, ()),
)
MEASURED_8_BIT = {"h100": 0.71 / 0.80}
"""Best measured share of the peak in fp8 over that in bfloat16, of large products."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="?")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rows", action="store_true", help="each run beside its source's figures")
    args = parser.parse_args()
    if args.speed:
        speed()
        return
    if args.runs is None:
        parser.error("RUNS.csv, or --speed")
    runs = [run for run in read_runs(args.runs) if not run.skipped and run.iter_s]
    for gpu in dict.fromkeys(run.gpu for run in runs):
        mine = [run for run in runs if run.gpu == gpu]
        constants = CATALOGUE[gpu].fitted
        is_fitted = args.fit and gpu in FITTED
        if is_fitted:
            constants = fit([run for run in mine if is_seen(run)], constants)
            print(gpu, constants)
        report(mine, constants, is_each_shown=args.rows)
        if is_fitted:
            leave_one_out(mine, constants)


def speed() -> None:
    """Seconds of the process on one core, and layouts a minute; the median of five searches."""
    print(f"{'search':28} {'layouts':>8} {'seconds':>8} {'a minute':>10}")
    for name, num_devices, overrides in SEARCHES:
        job = load_job(JOBS / name, overrides)
        seconds = []
        for _ in range(5):
            begin = process_time()
            result = search(job, CATALOGUE["h100"], num_devices=num_devices, top=1)
            seconds.append(process_time() - begin)
        tried, taken = 1 + sum(result.refused.values()), median(seconds)
        print(f"{name[:20]:20} {num_devices:7} {tried:8,} {taken:8.2f} {60 * tried / taken:10,.0f}")


def is_seen(run: PublishedRun) -> bool:
    """Return whether constants were fitted to the run's source."""
    return run.source.startswith(FITTED.get(run.gpu, ("nothing",)))


def errors(runs: Sequence[PublishedRun], constants: Fitted) -> np.ndarray:
    """Predicted over published seconds, less 1."""
    device = replace(CATALOGUE[runs[0].gpu], fitted=constants)
    return np.array([compare(run, device).iter_s / run.iter_s - 1 for run in runs])


def fit(runs: Sequence[PublishedRun], start: Fitted) -> Fitted:
    """Least squares of the logarithm of the error, held near ``start``, no share above 0.92."""
    names = FREE[runs[0].gpu]
    origin = np.log([getattr(start, name) for name in names])

    def at(point: np.ndarray) -> Fitted:
        values = dict(zip(names, map(float, np.exp(point)), strict=True))
        found = replace(start, **values)
        ratio = MEASURED_8_BIT.get(runs[0].gpu, 0.0)
        return replace(found, matmul_8_bit_share=found.matmul_share * ratio)

    def loss(point: np.ndarray) -> float:
        found = at(point)
        over = sum(max(0.0, getattr(found, n) - 0.92) ** 2 for n in names if n.endswith("share"))
        held = 0.003 * float(np.sum((point - origin) ** 2))
        return 10 * float(np.mean(np.log1p(errors(runs, found)) ** 2)) + held + 10 * over

    options = {"maxiter": 300, "adaptive": True}
    return at(minimize(loss, origin, method="Nelder-Mead", options=options).x)


def report(runs: Sequence[PublishedRun], constants: Fitted, *, is_each_shown: bool = False) -> None:
    """Errors by source, then over all unseen runs."""
    print(runs[0].gpu)
    by_source: dict[str, list[tuple[PublishedRun, float]]] = defaultdict(list)
    for run, error in zip(runs, errors(runs, constants), strict=True):
        by_source[run.source].append((run, float(error)))
    print(f"{'source':48} {'runs':>4} {'median':>7} {'worst':>7} {'rank corr.':>10}")
    for source, pairs in by_source.items():
        size = [abs(error) for _, error in pairs]
        seen = "fitted to" if is_seen(pairs[0][0]) else ""
        order = _order(pairs)
        print(
            f"{source[:48]:48} {len(pairs):4} {median(size):7.1%} {max(size):7.1%} {order:10.3f} {seen}"
        )
        if is_each_shown:
            for run, error in pairs:
                print(f"    {run.model:44} {run.num_gpus:5} GPUs {run.iter_s:9.3f} s {error:+7.1%}")
    unseen = [abs(e) for pairs in by_source.values() for run, e in pairs if not is_seen(run)]
    within = sum(size <= 0.2 for size in unseen) / len(unseen)
    print(f"unseen runs: {len(unseen)}, median {median(unseen):.1%}, {within:.0%} within 20 %\n")
    _report_memory(runs, constants)


def _order(pairs: Sequence[tuple[PublishedRun, float]]) -> float:
    published = [run.iter_s for run, _ in pairs]
    predicted = [run.iter_s * (1 + error) for run, error in pairs]
    return float(spearmanr(published, predicted).statistic)


def _report_memory(runs: Sequence[PublishedRun], constants: Fitted) -> None:
    printed = [run for run in runs if run.memory_gib]
    if not printed:
        return
    device = replace(CATALOGUE[runs[0].gpu], fitted=constants)
    off = [abs(compare(run, device).memory_gib / run.memory_gib - 1) for run in printed]
    within = sum(size <= 0.1 for size in off)
    print(
        f"memory of {len(printed)} runs that print it: median {median(off):.1%}, worst {max(off):.1%}, "
        f"{within} within 10 %\n"
    )


def leave_one_out(runs: Sequence[PublishedRun], constants: Fitted) -> None:
    """Errors on each source that was fitted to, when the fit has not seen it."""
    seen = [run for run in runs if is_seen(run)]
    for source in sorted({run.source for run in seen}):
        others = [run for run in seen if run.source != source]
        if others:
            left = [run for run in seen if run.source == source]
            size = np.abs(errors(left, fit(others, constants)))
            print(f"without {source[:40]}: median {np.median(size):.1%}, worst {size.max():.1%}")


if __name__ == "__main__":
    main()
