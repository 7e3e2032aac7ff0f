"""Charts of a run's metrics, from the table CHARTS: learning, speed, experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from raymega.drawing.bars import draw_heat
from raymega.drawing.chart import Chart, Curve, Mark, draw_chart
from raymega.tracking.history import RunHistory, Series
from raymega.tracking.names import METRICS, TASK_METRIC

MOST_PARTS = 5
"""Most parts of a metric that get a curve each; of more the least, middle and largest are drawn."""
MOST_EXPERTS = 96
"""Most rows of the heat map; a run with more experts gets a row a layer, its busiest expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A chart of the page, left out where the run has none of its metrics.

    Attributes:
        title: Heading with the unit.
        names: Short names of the metrics; one with parts, such as ``max_load``, stands for all of them.
        kind: Lines to read: of steps or of evaluations.
        is_log: Whether the axis is logarithmic.
        starts_at_zero: Whether the axis begins at 0.
        needs_change: Whether a chart of a constant is left out.
    """

    title: str
    names: tuple[str, ...]
    kind: Literal["steps", "evaluations"] = "steps"
    is_log: bool = False
    starts_at_zero: bool = False
    needs_change: bool = True


LEARNING = (
    Shown(title="Gradient norm before clipping", names=("grad_norm",), is_log=True),
    Shown(title="Loss of multi-token heads, nats", names=("mtp_loss",)),
    Shown(title="Loss of pairs of segments, nats", names=("pair_loss",)),
    Shown(title="Rewards of answers", names=("chosen_reward", "rejected_reward")),
    Shown(title="Share of right pairs, documents or tokens", names=("accuracy",)),
    Shown(title="Validation loss by set, nats", names=("set_loss",), kind="evaluations"),
    Shown(title="Loss scale", names=("loss_scale",), is_log=True),
    Shown(title="Sequences a step", names=("global_batch_size",), starts_at_zero=True),
    Shown(title="Tokens read of each dataset", names=("source_tokens",)),
)
SPEED = (
    Shown(title="Tokens/s", names=("tokens_per_s",), starts_at_zero=True, needs_change=False),
    Shown(title="MFU", names=("mfu",), starts_at_zero=True, needs_change=False),
    Shown(title="Model TFLOP/s a worker", names=("tflops_per_worker",), starts_at_zero=True),
    Shown(title="Step time, s", names=("step_time_s",), is_log=True),
    Shown(title="Packing efficiency", names=("packing_efficiency",)),
)
EXPERTS = (
    Shown(title="Busiest expert, times the mean load", names=("max_load",), is_log=True),
    Shown(title="Share of choices dropped", names=("drop_rate",)),
    Shown(title="Entropy of routers, nats", names=("router_entropy",)),
)
TASK = f"{TASK_METRIC.partition('/')[2]}/"
"""Start of the short names of evaluation tasks' metrics: ``task/lambada/accuracy``."""
ACCURACY, PERPLEXITY = "Accuracy by task", "Perplexity and loss by task"
ERRORS = "_stderr"
"""End of the names of standard errors, which have no curve."""
DRAWN_ELSEWHERE = frozenset(
    {
        *("loss", "perplexity", "set_loss", "set_perplexity", TASK[:-1]),
        *("ema_loss", "ema_perplexity", "set_ema_perplexity"),
    }
)
"""Evaluation metrics that have a chart of their own or repeat one."""


def loss_chart(
    history: RunHistory, *, title: str = "Loss, nats per token",
    levels: Mapping[str, float] | None = None, alone: bool = False,
) -> str:  # fmt: skip
    """Return the loss curve: training, validation, attempts, tokens, and the learning rate below."""
    steps, evaluations = history.steps, history.evaluations
    named = (
        ("training", steps.get("loss")),
        ("validation", evaluations.get("loss")),
        ("validation of the average", evaluations.get("ema_loss")),
    )
    chart = Chart(
        title=title,
        curves=[_curve(label, series) for label, series in named if series is not None],
        marks=_marks(history),
        levels=levels or {},
        tokens=_curve("tokens", steps["tokens"]) if "tokens" in steps else None,
        below=_curve("learning rate", steps["lr"]) if "lr" in steps else None,
    )
    return draw_chart(chart, alone=alone)


def charts_of(history: RunHistory, table: Sequence[Shown]) -> Iterator[str]:
    """Yield the charts of a table for which the run has values."""
    for shown in table:
        found = history.steps if shown.kind == "steps" else history.evaluations
        curves = [curve for name in shown.names for curve in _curves(found, name)]
        if not curves or (shown.needs_change and _is_constant(curves)):
            continue
        chart = Chart(
            title=shown.title,
            curves=curves,
            marks=_marks(history),
            is_log=shown.is_log and any(y > 0 for curve in curves for y in curve.ys),
            starts_at_zero=shown.starts_at_zero,
        )
        yield draw_chart(chart)


def evaluation_charts(history: RunHistory) -> Iterator[str]:
    """Yield a chart of each further evaluation metric, such as the accuracy of a task."""
    yield from (draw_chart(chart) for _, chart in task_charts(history))
    names = dict.fromkeys(name.partition("/")[0] for name in history.evaluations)
    table = [
        Shown(title=name.replace("_", " ").capitalize(), names=(name,), kind="evaluations",
              needs_change=False)
        for name in names
        if name not in DRAWN_ELSEWHERE
    ]  # fmt: skip
    yield from charts_of(history, table)


def task_charts(history: RunHistory) -> Iterator[tuple[str, Chart]]:
    """Yield the charts of evaluation tasks by kind, ACCURACY and then PERPLEXITY."""
    tasks = {
        name.removeprefix(TASK): series
        for name, series in history.evaluations.items()
        if name.startswith(TASK) and not name.endswith(ERRORS)
    }
    # Accuracies share a scale from 0; perplexities of different tasks lie far apart.
    for title, are_shares in ((ACCURACY, True), (PERPLEXITY, False)):
        found = [
            _curve(name, tasks[name]) for name in sorted(tasks) if is_share(name) == are_shares
        ]
        if found:
            # One curve has no legend.
            name = f": {found[0].label}" if len(found) == 1 else ""
            yield (
                title,
                Chart(
                    title=f"{title}{name}",
                    curves=found,
                    marks=_marks(history),
                    is_log=not are_shares,
                    starts_at_zero=are_shares,
                ),
            )


def is_share(name: str) -> bool:
    """Return whether ``TASK/METRIC`` is a share of the task's documents, such as an accuracy."""
    return name.partition("/")[2].startswith(("acc", "exact"))


def expert_map(history: RunHistory, *, alone: bool = False, title: str = "Load of experts") -> str:
    """Return the heat map of expert loads; empty where the run has none."""
    loads = history.experts
    if not loads:
        return ""
    steps = sorted(loads)
    first = loads[steps[0]]
    is_wide = sum(map(len, first.values())) > MOST_EXPERTS
    rows: dict[str, list[float]] = {}
    for layer in sorted(first):
        shares = [_shares(loads[step].get(layer, ())) for step in steps]
        if is_wide:
            rows[f"layer {layer}"] = [max(share, default=1.0) for share in shares]
            continue
        for expert in range(len(first[layer])):
            label = f"layer {layer}: 0" if expert == 0 else f"{layer}: {expert}"
            rows[label] = [share[expert] if share else 1.0 for share in shares]
        rows[f"after {layer}"] = []
    return draw_heat(
        f"{title}, {'busiest of each layer' if is_wide else 'layer: expert'}",
        rows,
        steps,
        alone=alone,
    )


def _marks(history: RunHistory) -> list[Mark]:
    return [
        Mark(label=f"attempt {attempt}", at=lost, since=restored)
        for attempt, lost, restored in history.restarts
    ]


def _curves(found: Mapping[str, Series], name: str) -> list[Curve]:
    """Return the curve of a metric, or those of its parts."""
    if name in found:
        return [_curve(name.replace("_", " "), found[name])]
    parts = {key.partition("/")[2]: series for key, series in found.items()
             if key.startswith(f"{name}/") and len(series.steps)}  # fmt: skip
    if len(parts) <= MOST_PARTS:
        return [_curve(_part_label(name, part), series) for part, series in parts.items()]
    # of many parts only how far apart they are
    steps = next(iter(parts.values())).steps
    at_steps = [
        [value for series in parts.values() if (value := series.at(step)) is not None]
        for step in steps
    ]
    return [
        Curve(label=f"{label} of {len(parts)}", xs=steps, ys=[of(values) for values in at_steps])
        for label, of in (("largest", max), ("middle", median), ("least", min))
    ]


def _part_label(name: str, part: str) -> str:
    """Return ``layer 3`` for a number, and a name as it is."""
    kinds = {metric.short_name: metric.part for metric in METRICS}
    return f"{kinds.get(name, '')} {part}".strip() if part.isdigit() else part


def _curve(label: str, series: Series) -> Curve:
    return Curve(label=label, xs=series.steps, ys=series.values)


def _is_constant(curves: Sequence[Curve]) -> bool:
    return all(len(set(curve.ys)) <= 1 for curve in curves)


def _shares(counts: Sequence[float]) -> list[float]:
    """Return each expert's load over the mean load."""
    total = max(sum(counts), 1.0)
    return [count * len(counts) / total for count in counts]
