"""Runs with products in fp8 beside the same run in bfloat16: losses over each other, and their gap.

One rank, the same seed, samples and steps for each recipe; the losses of all are drawn. On a GPU it also
prints tokens per second, of which fp8 is meant to make more; a CPU emulates fp8 and is slower with it.

    python -m benchmarks.fp8 --data demo-out/corpus [--steps N] [--draw docs/img/fp8-loss.svg] [--large]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from raymega.config.load import parse_mapping
from raymega.messages import Requests
from raymega.parallel.comm.process_groups import build_groups
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.train.build import build_parts
from raymega.train.forward_backward import evaluate
from raymega.train.state import first_state
from raymega.train.step import train_step

RECIPES = ("none", "float32", "regrouped", "rowwise", "tensorwise")
"""bfloat16; two measures of what another rounding alone does: float32, and bfloat16 in micro-batches of
half the size; and fp8."""
COLOURS = {
    "none": "#22262b", "float32": "#8a8f98", "regrouped": "#b9bec6", "rowwise": "#2f6fb0",
    "tensorwise": "#d9772b",
}  # fmt: skip
NAMES = {"none": "bfloat16", "float32": "float32", "regrouped": "bfloat16, smaller micro-batches"}
SMALL = {
    "num_layers": 6,
    "hidden_size": 128,
    "num_heads": 8,
    "num_kv_heads": 4,
    "ffn_hidden_size": 320,
}
LARGE = {
    "num_layers": 24,
    "hidden_size": 2048,
    "num_heads": 16,
    "num_kv_heads": 16,
    "ffn_hidden_size": 5632,
}
SEQ_LEN = {"small": 128, "large": 2048}
WINDOW = 20
"""Steps of a mean."""


@dataclass(kw_only=True)
class Curve:
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    valid: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings that all recipes share; ``batch`` is in sequences."""

    data: str
    steps: int
    is_large: bool
    lr: float
    batch: int
    seed: int


def make_bench_plan(recipe: str, setting: Setting) -> RunPlan:
    is_large = setting.is_large
    seq_len = SEQ_LEN["large" if is_large else "small"]
    # the first three are the measures of what rounding alone does
    precision = {
        "none": {"dtype": "bfloat16"},
        "regrouped": {"dtype": "bfloat16"},
        "float32": {"dtype": "float32"},
    }.get(recipe, {"dtype": "bfloat16", "fp8": recipe})
    values: dict[str, Any] = {
        "run": {
            "name": "fp8", "steps": setting.steps, "eval_samples": 64, "seed": setting.seed,
        },
        "model": {
            "family": "llama", "vocab_size": 2048, "max_positions": seq_len,
            **(LARGE if is_large else SMALL),
        },
        "data": {"path": setting.data, "seq_len": seq_len, "global_batch_size": setting.batch},
        "schedule": {"micro_batch_size": 2 if recipe == "regrouped" else 4},
        "optimizer": {"lr": setting.lr, "lr_warmup_steps": 20},
        "precision": precision,
    }  # fmt: skip
    if is_large:
        # casts to fp8 are worth their time only when they are fused
        values["run"]["kernels"] = "compile"
    return make_plan(parse_mapping(values).job())


def train(plan: RunPlan) -> Curve:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = build_parts(
        plan, rank=0, groups=build_groups(plan.grid, 0, timeout_s=60.0), device=device
    )
    # train as one rank does, without a driver
    state, curve = first_state(plan.job.precision), Curve()
    for _ in range(plan.job.run.steps):
        began = time.monotonic()
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        curve.losses.append(outcome.loss)
        curve.seconds.append(time.monotonic() - began)
    curve.valid = evaluate(parts)["eval/loss"]
    return curve


def draw(curves: dict[str, Curve], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["axes.unicode_minus"] = False
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 5.5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    plain = curves["none"].losses
    for recipe, curve in curves.items():
        name = NAMES.get(recipe, f"fp8 {recipe}")
        steps = range(1, len(curve.losses) + 1)
        above.plot(steps, curve.losses, color=COLOURS[recipe], label=name, linewidth=1)
        if recipe != "none":
            # the same samples step by step, so that the difference is rounding's
            gaps = [a - b for a, b in zip(curve.losses, plain, strict=True)]
            below.plot(steps, gaps, color=COLOURS[recipe], linewidth=1)
    above.set_ylabel("training loss, nats per token")
    above.legend()
    below.set_ylabel("less bfloat16's")
    below.set_xlabel("step")
    below.axhline(0, color="#8a8f98", linewidth=0.5)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="demo-out/corpus", help="a prepared dataset")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--large", action="store_true", help="1.3B parameters, for a GPU")
    parser.add_argument(
        "--lr", type=float, default=0.0, help="peak rate; 0 is 1e-3, or 3e-4 with --large"
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", default=",".join(RECIPES), help="recipes, of which none is first")
    parser.add_argument("--draw", default="", help="where to write the picture")
    options = parser.parse_args()
    steps = 2 * WINDOW if options.quick else options.steps
    torch.set_num_threads(1)
    data, curves = str(Path(options.data).absolute()), {}
    lr = options.lr or (3e-4 if options.large else 1e-3)
    recipes = [r for r in options.only.split(",") if r != "float32" or not options.large]
    setting = Setting(
        data=data, steps=steps, is_large=options.large, lr=lr, batch=options.batch, seed=options.seed
    )  # fmt: skip
    for recipe in recipes:
        plan = make_bench_plan(recipe, setting)
        curve = curves[recipe] = train(plan)
        plain = curves["none"]
        tokens = plan.batch.global_batch_size * plan.job.data.seq_len
        facts = {
            "recipe": recipe,
            "train_loss": fmean(curve.losses[-WINDOW:]),
            "valid_loss": curve.valid,
            "train_gap": fmean(curve.losses[-WINDOW:]) - fmean(plain.losses[-WINDOW:]),
            "valid_gap": curve.valid - plain.valid,
            "tokens_per_s": tokens / median(curve.seconds),
        }
        print(
            f"{recipe:>10}: loss of the last {WINDOW} steps {facts['train_loss']:.4f} "
            f"({facts['train_gap']:+.4f}), validation {curve.valid:.4f} ({facts['valid_gap']:+.4f}), "
            f"{facts['tokens_per_s']:,.0f} tokens/s"
        )
        print(json.dumps(facts))
    if options.draw:
        draw(curves, Path(options.draw))


if __name__ == "__main__":
    main()
