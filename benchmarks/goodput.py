"""Goodput at 1,024 and 16,384 GPUs, simulated from published constants; or measured here under random kills.

Failures come at random with the published mean time between them. Each costs detection, the recovery ladder of
docs/recovery-time.md by part, and the steps that must be done again; steady state costs snapshots and checkpoints. Every
constant has its source beside it and is swept from 0.3 to 3 times its value, the others held.

    python -m benchmarks.goodput [--draw docs/img/goodput.svg] [--hours 2000]
    python -m benchmarks.goodput --live [--mtbf 60] [--seconds 600]     # needs a quiet machine and twice that time
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

FACTORS = tuple(round(0.3 * 10 ** (number / 10), 3) for number in range(11))
"""0.3 to 3, evenly on a logarithmic axis."""
SEED = 11
JOB = Path(__file__).parents[1] / "jobs" / "verify.yaml"


@dataclass(frozen=True, kw_only=True)
class Constants:
    """A cluster and a job. Names say the unit."""

    gpus: int
    mttf_h: float
    step_s: float
    init_s: float
    detect_crash_s: float = 4.5
    hang_share: float = 0.10
    detect_hang_s: float = 60.0
    control_s: float = 1.0
    spare_s: float = 30.0
    no_spare_share: float = 0.05
    acquire_s: float = 600.0
    bytes_per_gpu: float = 4e9
    memory_gb_s: float = 10.0
    correlated_share: float = 0.05
    store_gb_s: float = 2000.0
    checkpoint_every_s: float = 1800.0
    snapshot_every: float = 10.0
    host_gb_s: float = 50.0


SOURCES = {
    "mttf_h": "Kokolis et al. 2024 (arXiv:2410.21680): 7.9 h at 1,024 GPUs, 1.8 h at 16,384",
    "step_s": "assumed: 5 s and 10 s; a 405B model took about 11 s a step on 16,384 GPUs (arXiv:2407.21783)",
    "init_s": "communicators: MegaScale (NSDI 2024), under 5 s at 2,048 and under 30 s above 10,000 GPUs",
    "detect_crash_s": "measured here: a frozen node with the health checks of cluster/ (docs/recovery-time.md)",
    "hang_share": "assumed: 1 failure in 10 shows as a hang",
    "detect_hang_s": "assumed: three to six steps without progress, a cautious deadline",
    "control_s": "measured here: 0.26 s on 8 ranks, from detection to rendezvous (docs/recovery-time.md); 1 s taken",
    "spare_s": "assumed: a warm spare loads kernels and contexts it does not have; none is measured on GPUs",
    "no_spare_share": "assumed: 1 failure in 20 finds no spare ready",
    "acquire_s": "assumed: ten minutes for another node, or for the re-planned grid's first steps",
    "bytes_per_gpu": "Llama 3 (arXiv:2407.21783): a checkpoint is up to 4 GB per GPU",
    "memory_gb_s": "assumed: a quarter of a 400 Gbit/s card per GPU for state from a partner's memory",
    "correlated_share": "assumed: 1 failure in 20 takes a rank and its partner; state comes from the store then",
    "store_gb_s": "Llama 3 (arXiv:2407.21783): 2 TB/s sustained from its storage",
    "checkpoint_every_s": "assumed: every half hour, which only correlated losses go back to",
    "snapshot_every": "chosen: elastic.snapshot_every, steps between snapshots in memory",
    "host_gb_s": "PCIe 5.0 with 16 lanes moves 64 GB/s; training waits for the copy to host memory",
}

SIZES = {
    1_024: Constants(
        gpus=1_024, mttf_h=7.9, step_s=5.0, init_s=5.0, store_gb_s=2000 * 1_024 / 16_384
    ),
    16_384: Constants(gpus=16_384, mttf_h=1.8, step_s=10.0, init_s=30.0, snapshot_every=4.0),
}
BARS = {1_024: 0.99, 16_384: 0.97}


def simulate(c: Constants, *, hours: float, seed: int = SEED) -> float:
    """Share of wall time in steps that count, over enough failures for three digits."""
    draw = np.random.default_rng(seed)
    number = max(2000, int(hours / c.mttf_h))
    # failures without memory: exponential times between them
    up_s = draw.exponential(c.mttf_h * 3600, number)
    chance = draw.random((4, number))
    # what kind of failure each is; independent of each other
    is_hang = chance[0] < min(1.0, c.hang_share)
    has_no_spare = chance[1] < min(1.0, c.no_spare_share)
    is_correlated = chance[2] < min(1.0, c.correlated_share)
    # time without steps: detection, decision, communicators, a place, state
    down_s = np.where(is_hang, c.detect_hang_s, c.detect_crash_s) + c.control_s + c.init_s
    down_s = down_s + np.where(has_no_spare, c.acquire_s, c.spare_s)
    from_memory_s = c.bytes_per_gpu / (c.memory_gb_s * 1e9)
    from_store_s = c.bytes_per_gpu * c.gpus / (c.store_gb_s * 1e9)
    down_s = down_s + np.where(is_correlated, from_store_s, from_memory_s)
    # A snapshot of the step before the newest may be the newest that is whole; two losses at once go back to a checkpoint.
    since_snapshot_s = (1 + c.snapshot_every * chance[3]) * c.step_s
    since_checkpoint_s = c.checkpoint_every_s * chance[3]
    lost_s = np.minimum(up_s, np.where(is_correlated, since_checkpoint_s, since_snapshot_s))
    # steady state: training waits for copies to the host
    copy_s = c.bytes_per_gpu / (c.host_gb_s * 1e9)
    overhead = copy_s / (c.snapshot_every * c.step_s) + copy_s / c.checkpoint_every_s
    good_s = (up_s - lost_s) * (1 - overhead)
    # A failure while recovering starts the recovery over: as often as the rate says, to first order.
    again = 1 + down_s.mean() / (c.mttf_h * 3600)
    return float(good_s.sum() / (up_s.sum() + down_s.sum() * again))


def sweep(size: int, *, hours: float) -> dict[str, list[float]]:
    """Goodput by constant, for each of FACTORS."""
    base = SIZES[size]
    names = [field.name for field in fields(base) if field.name != "gpus"]
    return {
        name: [
            simulate(replace(base, **{name: getattr(base, name) * factor}), hours=hours)
            for factor in FACTORS
        ]
        for name in names
    }


def breaking(size: int, rows: dict[str, list[float]], *, hours: float) -> dict[str, float]:
    """Return, by constant, the factor at which goodput falls below the bar; constants that never cause it are left out."""
    base, bar, found = SIZES[size], BARS[size], {}
    for name, values in rows.items():
        # no value of the sweep breaks the bar
        if min(values) >= bar:
            continue
        sign = 1 if values[-1] < values[0] else -1
        # bisect on the logarithm of the factor, in the direction that hurts
        low, high = 0.0, math.log(3.4)
        for _ in range(30):
            middle = (low + high) / 2
            factor = math.exp(sign * middle)
            is_met = (
                simulate(replace(base, **{name: getattr(base, name) * factor}), hours=hours) >= bar
            )
            low, high = (middle, high) if is_met else (low, middle)
        found[name] = math.exp(sign * low)
    return dict(sorted(found.items(), key=lambda item: abs(math.log(item[1]))))


def draw(rows: dict[int, dict[str, list[float]]], path: Path) -> None:
    """Draw one panel per cluster size; the most influential constants are coloured and named."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (size, lines) in zip(figure.subplots(1, len(rows)), rows.items(), strict=True):
        # the constants that move goodput most get a colour
        by_range = sorted(lines, key=lambda name: -np.ptp(lines[name]))
        for number, name in enumerate(by_range):
            is_shown = number < 7
            axes.plot(
                FACTORS, [100 * value for value in lines[name]], lw=1.6 if is_shown else 0.8,
                color=f"C{number}" if is_shown else "#c8ccd2", label=name if is_shown else None,
            )  # fmt: skip
        axes.axhline(100 * BARS[size], color="#c0392b", ls="--", lw=1)
        axes.set(xscale="log", title=f"{size:,} GPUs, MTTF {SIZES[size].mttf_h} h",
                 xlabel="times its value", ylabel="goodput, %")  # fmt: skip
        axes.set_xticks([0.3, 1, 3], ["0.3", "1", "3"])
        axes.minorticks_off()
        axes.legend(fontsize=7)
    figure.savefig(path)


def simulate_all(hours: float, path: Path | None) -> None:
    """Print and draw."""
    for name, source in SOURCES.items():
        values = " / ".join(f"{getattr(c, name):g}" for c in SIZES.values())
        print(f"{name:20} {values:16} {source}")
    rows = {size: sweep(size, hours=hours) for size in SIZES}
    for size, lines in rows.items():
        value = simulate(SIZES[size], hours=hours)
        print(f"\n{size:,} GPUs: goodput {value:.2%}, bar {BARS[size]:.0%}")
        print(f"  worst of any constant from x0.3 to x3: {min(min(v) for v in lines.values()):.2%}")
        for name, factor in breaking(size, lines, hours=hours).items():
            print(
                f"  {name} breaks the bar at x{factor:.2f} ({getattr(SIZES[size], name) * factor:.3g})"
            )
        print(json.dumps({"gpus": size, "goodput": value, "bar": BARS[size]}))
    if path is not None:
        draw(rows, path)


def live(*, mtbf_s: float, seconds: float, batch: int, seed: int) -> None:
    """A random kill every ``mtbf_s`` on average, with the command that users have."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            "run.steps=100000000", "run.eval_samples=0", "checkpoint.every=200", "tracking.mlflow_uri=off",
            "parallel.tp=1", "parallel.pp=2", "parallel.dp=2", "cluster.cpus_per_worker=1.0",
            "elastic.snapshot_every=1", "elastic.spares=1", "elastic.max_failures=1000",
            "optimizer.lr_decay_steps=100000", f"data.global_batch_size={batch}",
        ]  # fmt: skip
        command = [
            sys.executable, "-c", "from raymega.cli.main import run; run()", "chaos", str(JOB),
            "--mtbf", str(mtbf_s), "--seconds", str(seconds), "--kinds", "kill-worker", "--seed", str(seed),
            "--out", folder, *(word for setting in settings for word in ("--set", setting)),
        ]  # fmt: skip
        done = subprocess.run(command, check=False)
        report = json.loads((Path(folder) / "report.json").read_text())
    # an incident at the very end has no recovery
    recoveries = [each["recovery_s"] for each in report["incidents"] if each["recovery_s"]]
    print(
        f"{len(report['incidents'])} kills in {report['wall_s']:.0f} s: goodput {report['goodput']:.1%}, recovery "
        f"median {np.median(recoveries):.2f} s, exit code {done.returncode}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=20_000, help="simulated time of each point")
    parser.add_argument("--draw", type=Path, help="where to draw the sweeps")
    parser.add_argument("--live", action="store_true", help="kill workers of a real run instead")
    parser.add_argument("--mtbf", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--batch", type=int, default=128, help="samples of a step, in --live")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    if options.live:
        live(
            mtbf_s=options.mtbf, seconds=options.seconds, batch=options.batch, seed=options.seed
        )  # fmt: skip
    else:
        simulate_all(options.hours, options.draw)


if __name__ == "__main__":
    main()
