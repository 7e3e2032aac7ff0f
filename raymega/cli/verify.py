"""Command `raymega verify`: options and output of the layout-invariance test in `raymega/verify`."""

from __future__ import annotations

import json
import sys
from math import isfinite
from typing import Annotated, TextIO

import typer

from raymega import api
from raymega.cli.options import AsJsonLines, JobFile, Overrides
from raymega.cli.output import print_json, table
from raymega.cli.progress import OnProgress, phase_bars
from raymega.config.grid_text import set_options
from raymega.errors import counted
from raymega.verify.compare import Deviation
from raymega.verify.layout import DEGREES, OPTIONS, Device
from raymega.verify.rounding import LIMIT_OF_SPREAD, Precision
from raymega.verify.run import Options, Outcome, Report, Watcher
from raymega.verify.shrink import Shrunk

HEADERS = (
    "layout", "schedule", "micro-batch", "options", "loss", "eval loss", "gradient norm", "other", "worst tensor",
    "off by", "seconds",
)  # fmt: skip

DEEP_S = 3600.0
"""Seconds of a verification with --deep."""


def verify(
    job_file: JobFile,
    overrides: Overrides = None,
    layouts: Annotated[int, typer.Option(min=1, max=10_000)] = 8,
    max_ranks: Annotated[int, typer.Option(min=2, max=1024)] = 8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[int, typer.Option(min=1)] = 3,
    max_params: Annotated[int, typer.Option(min=1)] = 2_000_000,
    timeout_s: Annotated[float, typer.Option(min=1, max=86400)] = 120.0,
    precision: Annotated[Precision, typer.Option()] = "float64",
    device: Annotated[Device, typer.Option()] = "cpu",
    deep: Annotated[bool, typer.Option("--deep")] = False,
    as_json: AsJsonLines = False,
) -> None:
    """Check that this job trains the same on random parallel layouts as on one rank.

    Trains it in float64 over CPU processes, and compares losses, gradient norm, learning rate, tokens, expert loads,
    every parameter and the optimizer state after every step with the run on one rank. A run is saved on one layout and
    resumed on another. A deviation above 1e-9 is exit 1, with the smallest layout that reproduces it. A large model
    is shrunk, its features kept.

    Options:
        layouts: Number of random layouts.
        max_ranks: Maximum number of processes of a layout.
        seed: Seed of the random layouts.
        steps: Optimizer steps on each layout.
        max_params: Maximum number of parameters, to which a larger model is shrunk.
        timeout_s: Maximum time of one layout, in seconds.
        precision: Dtype of the layouts; below float64 they are compared with the spread of roundings on one rank.
        device: Device of the layouts; with cuda, those that fit this machine's GPUs are compared with the CPU's run.
        deep: Draw and train layouts for an hour.

    Example: raymega verify jobs/verify.yaml --layouts 16 --seed 7
    """
    options = Options(
        layouts=layouts,
        max_ranks=max_ranks,
        seed=seed,
        steps=steps,
        max_params=max_params,
        timeout_s=timeout_s,
        budget_s=DEEP_S if deep else 0.0,
        precision=precision,
        device=device,
    )
    job = api.load_job(job_file, overrides or ())
    out = sys.stdout
    with phase_bars() as on_progress:
        watcher = _Screen(on_progress, out, as_json=as_json)
        report = api.verify(job, options=options, watcher=watcher)
    if as_json:
        print_json(_verdict_object(report))
    else:
        _show_report(report)
    if not report.is_same:
        raise typer.Exit(1)


class _Screen(Watcher):
    """Watcher that shows the progress bar, how the job was shrunk, and with --json a line per finished layout."""

    def __init__(self, on_progress: OnProgress, out: TextIO, *, as_json: bool) -> None:
        self._on_progress, self._out, self._as_json = on_progress, out, as_json
        self._total = self._done = self._tried = 0

    def on_start(self, shrunk: Shrunk, num_layouts: int) -> None:
        # The run on one rank counts as one, and so does the resumed one.
        self._total = num_layouts + 2
        if not self._as_json:
            self._print(_shrunk_text(shrunk))
        self._on_progress("layouts", 0, self._total)

    def on_reference(self) -> None:
        self._advance()

    def on_layout(self, outcome: Outcome) -> None:
        self._advance()
        if self._as_json:
            self._print(json.dumps({"event": "layout", **_outcome_object(outcome)}))

    def on_shrinking(self) -> None:
        self._tried += 1
        self._on_progress("searching the smallest failing layout", self._tried, self._tried + 1)

    def _print(self, text: str) -> None:
        """Print to sys.stdout on a terminal, where rich puts it above the bar on stderr; else to the real stdout."""
        print(text, file=sys.stdout if self._out.isatty() else self._out, flush=True)

    def _advance(self) -> None:
        self._done += 1
        self._on_progress("layouts", self._done, max(self._done, self._total))


def _shrunk_text(shrunk: Shrunk) -> str:
    lines = ["the job, with these changes:" if shrunk.changes else "exactly the job"]
    lines += [f"  {change}" for change in shrunk.changes]
    lines += ["not tested here:", *(f"  {gap}" for gap in shrunk.untested)]
    return "\n".join(lines) + "\n"


def _show_report(report: Report) -> None:
    print(table(HEADERS, [_row(outcome) for outcome in report.outcomes]))
    print()
    if report.left_out:
        print(f"possible and not drawn: {'; '.join(report.left_out)}")
    pairs = report.pairs
    if pairs.own_left_out:
        print(
            f"pairs that this job's features run through, not drawn: {'; '.join(pairs.own_left_out)}"
        )
    print(f"pairs of options and degrees drawn: {pairs.num_drawn} of at least {pairs.num_possible}")
    # what limits the comparison: near ties of routers, undetermined weights, fp8 rounding
    if isfinite(report.router_margin):
        print(
            f"smallest router margin {report.router_margin:.1e}: rounding changes no choice of an "
            "expert as long as deviations are far smaller"
        )
    if report.undecided:
        print(
            f"compared with a looser limit: {', '.join(report.undecided)}: the loss does not depend on them, "
            "so their gradient is rounding noise, which the optimizer scales to a full step"
        )
    if isfinite(report.fp8_margin):
        print(
            f"smallest fp8 margin {report.fp8_margin:.1e} of the range: far smaller deviations round no number "
            "to another fp8 value"
        )
    if report.is_same:
        # passed: the largest deviation
        worst = _worst(report)
        print(
            f"same run on all {counted(report.num_layouts, 'layout')} over {counted(report.options.steps, 'step')}: "
            f"largest deviation {worst.value:.1e} ({worst.quantity}, step {worst.step}), limit "
            f"{_limit(report.options)}; {report.seconds:.1f} s"
        )
        return
    assert report.smallest, "a layout failed, so there is a smallest one"
    # failed: the smallest layout, and the settings that reproduce it
    failed = sum(not outcome.is_same for outcome in report.outcomes)
    print(
        f"NOT the same run on {failed} of {counted(len(report.outcomes), 'layout')}; {report.seconds:.1f} s"
    )
    print(f"smallest layout that reproduces it: {report.smallest.layout.describe()}")
    if report.smallest.resumed_from:
        print(f"resumed from a checkpoint of {report.smallest.resumed_from.describe()}")
    print(_explain(report.smallest, report.options))
    print(f"train it with {set_options(report.smallest.layout.overrides())}")


def _limit(options: Options) -> str:
    """Return the limit of deviations in words."""
    if options.precision == "float64":
        return f"{options.limit:g}"
    return f"{LIMIT_OF_SPREAD:g} times the spread of {options.precision} on one rank"


def _explain(outcome: Outcome, options: Options) -> str:
    if outcome.comparison is None:
        return f"its ranks failed: {outcome.failure}"
    first = outcome.comparison.first
    assert first, "the layout failed"
    return (
        f"first at step {first.step}: {first.quantity} deviates by {first.value:.3g}, "
        f"limit {_limit(options)}"
    )


def _row(outcome: Outcome) -> tuple[object, ...]:
    layout, found = outcome.layout, outcome.comparison
    # Ranks that raised have no deviations: show the error in their place.
    extras = layout.extras()
    if outcome.resumed_from:
        extras = ", ".join(filter(None, (f"resumed from {outcome.resumed_from.grid()}", extras)))
    head = (layout.grid(), layout.schedule, str(layout.micro_batch_size), extras)
    seconds = f"{outcome.seconds:.1f}"
    if found is None:
        return (*head, "failed", "-", "-", "-", outcome.failure, "-", seconds)
    return (
        *head,
        f"{found.loss.value:.1e}",
        f"{found.eval_loss.value:.1e}" if found.eval_loss else "-",
        f"{found.grad_norm.value:.1e}",
        f"{found.other.value:.1e}",
        found.tensor.quantity,
        f"{found.tensor.value:.1e}",
        seconds,
    )


def _worst(report: Report) -> Deviation:
    found = [outcome.comparison.largest for outcome in report.outcomes if outcome.comparison]
    return max(found, key=lambda deviation: deviation.value)


def _outcome_object(outcome: Outcome) -> dict[str, object]:
    layout, found = outcome.layout, outcome.comparison
    # the layout, then the deviations
    described = {
        "layout": layout.describe(),
        "grid": {axis: layout.degree(axis) for axis in DEGREES},
        "micro_batch_size": layout.micro_batch_size,
        **{option.name: layout.value(option) for option in OPTIONS},
        "resumed_from": outcome.resumed_from.describe() if outcome.resumed_from else None,
        "passed": outcome.is_same,
        "seconds": outcome.seconds,
    }
    if found is None:
        return described | {"failure": outcome.failure}
    return described | {
        "loss": _deviation_object(found.loss),
        "eval_loss": _deviation_object(found.eval_loss) if found.eval_loss else None,
        "grad_norm": _deviation_object(found.grad_norm),
        "other": _deviation_object(found.other),
        "tensor": _deviation_object(found.tensor),
        "first_above_limit": _deviation_object(found.first) if found.first else None,
    }


def _deviation_object(found: Deviation) -> dict[str, object]:
    """Return a deviation as plain values, with the text "infinite" for inf and nan, which JSON lacks."""
    value: object = found.value if found.value < float("inf") else "infinite"
    return {"quantity": found.quantity, "step": found.step, "deviation": value}


def _verdict_object(report: Report) -> dict[str, object]:
    has_any = any(outcome.comparison for outcome in report.outcomes)
    return {
        "event": "verdict",
        "passed": report.is_same,
        "layouts": report.num_layouts,
        "steps": report.options.steps,
        "precision": report.options.precision,
        "device": report.options.device,
        "limit": report.options.limit if report.options.precision == "float64" else LIMIT_OF_SPREAD,
        "not_drawn": list(report.left_out),
        "pairs_drawn": report.pairs.num_drawn,
        "pairs_possible": report.pairs.num_possible,
        "own_pairs_left_out": list(report.pairs.own_left_out),
        "router_margin": report.router_margin if isfinite(report.router_margin) else None,
        "undecided": list(report.undecided),
        "fp8_margin": report.fp8_margin if isfinite(report.fp8_margin) else None,
        "largest": _deviation_object(_worst(report)) if has_any else None,
        "smallest_failing": _outcome_object(report.smallest) if report.smallest else None,
        "changes": [str(change) for change in report.shrunk.changes],
        "not_tested": list(report.shrunk.untested),
        "seconds": report.seconds,
    }
