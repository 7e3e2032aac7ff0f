"""Writes dashboards/raymega.json, a Grafana dashboard: `python -m dashboards.generate`.

It owns the layout, which is the table ROWS. Names, units and help lines come from
raymega/tracking/names.py, so a panel of a metric that nothing declares cannot be written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from raymega.tracking.names import BY_NAME, TASK_METRIC, Metric

FOLDER = Path(__file__).parent
DASHBOARD = FOLDER / "raymega.json"
SCHEMA_VERSION = 39
GRID_WIDTH, PANEL_HEIGHT, STAT_HEIGHT = 24, 8, 4
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
UNITS = {"s": "s", "bytes": "bytes"}
ATTEMPT_LEGEND = "{{run}}, attempt {{attempt}}"
WINDOW = "$__rate_interval"
TIMELINE = "tracking.timeline_every"
MIB = " * 1024 * 1024"
"""Scale of Ray's figures of GPU memory, which are in MiB."""
OF_NODES = "As Ray's agent sees it, all processes of the node."
PART_SETTINGS = {
    ("train", "group"): "tracking.norms_every",
    ("train", "layer"): "tracking.activations_every",
    (
        "train",
        "role",
    ): "a rate of its own for a role, optimizer.layer_lr_decay or model.mup_base_width",
    ("moe", "layer"): "model.moe.num_experts",
    ("eval", "set"): "data.validation",
    ("eval", "metric"): "run.eval_tasks",
    ("data", "dataset"): "data.sources or data.stages",
    ("plugin", "name"): "plugins.metrics",
}


Kind = Literal["timeseries", "stat"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One query of a panel."""

    expr: str
    legend: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One picture; ``unit`` is Grafana's word for it."""

    title: str
    help: str
    lines: tuple[Line, ...]
    unit: str = "short"
    width: int = 8
    kind: Kind = "timeseries"
    is_log: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Panels under one heading; a folded row asks Prometheus for nothing until it is opened."""

    title: str
    panels: tuple[Panel, ...]
    is_folded: bool = True


def series(metric: Metric) -> str:
    """The name under which Prometheus has it; Ray adds both ends."""
    return f"ray_{metric.prometheus_name}{'_total' if metric.kind == 'counter' else ''}"


def select(name: str) -> str:
    """The series of ``name`` of the chosen runs."""
    return f'{series(BY_NAME[name])}{{run=~"$run"}}'


def by_attempt(name: str) -> str:
    """One value a run and attempt, whichever process showed it."""
    return f"max by (run, attempt) ({select(name)})"


def by_run(name: str) -> str:
    """One value a run."""
    return f"max by (run) ({select(name)})"


def by_rank(name: str) -> str:
    """One value a run and rank."""
    return f"max by (run, rank) ({select(name)})"


def curve(title: str, *names: str, width: int = 8, unit: str = "", is_log: bool = False) -> Panel:
    """A panel of metrics over time, a line an attempt; unit and help are the first one's."""
    metrics = [BY_NAME[name] for name in names]
    lines = tuple(
        Line(
            expr=by_attempt(metric.name),
            legend=ATTEMPT_LEGEND if len(names) == 1 else f"{metric.short_name} {ATTEMPT_LEGEND}",
        )
        for metric in metrics
    )
    return Panel(
        title=title,
        help=" ".join(metric.help for metric in metrics),
        lines=lines,
        unit=unit or UNITS.get(metrics[0].unit, "short"),
        width=width,
        is_log=is_log,
    )


def part_curve(title: str, name: str, *, is_log: bool = False) -> Panel:
    """A panel of one metric, a line for each part of the model that has its own."""
    metric = BY_NAME[name]
    line = Line(
        expr=f"max by (run, {metric.part}) ({select(name)})",
        legend=f"{{{{run}}}} {{{{{metric.part}}}}}",
    )
    setting = PART_SETTINGS[name.partition("/")[0], metric.part]
    help_line = f"{metric.help} Needs {setting}."
    return Panel(title=title, help=help_line, lines=(line,), is_log=is_log)


def task_curve(title: str, *, having: str, is_log: bool = False) -> Panel:
    """A panel of the evaluation tasks' metrics whose names match the regular expression ``having``."""
    panel = part_curve(title, TASK_METRIC, is_log=is_log)
    chosen = select(TASK_METRIC).replace("{", f'{{metric=~"{having}",')
    line = Line(expr=f"max by (run, metric) ({chosen})", legend=panel.lines[0].legend)
    return replace(panel, lines=(line,), width=12)


def number(title: str, name: str, *, unit: str = "", width: int = 4) -> Panel:
    """A panel of the newest value."""
    metric = BY_NAME[name]
    return Panel(
        title=title,
        help=metric.help,
        lines=(Line(expr=by_run(name), legend="{{run}}"),),
        unit=unit or UNITS.get(metric.unit, "short"),
        width=width,
        kind="stat",
    )


def rank_curve(title: str, name: str, *, needs: str = "", width: int = 8) -> Panel:
    """A panel of one metric, a line a rank."""
    metric = BY_NAME[name]
    help_line = f"{metric.help} Needs {needs}." if needs else metric.help
    line = Line(expr=by_rank(name), legend="{{run}} rank {{rank}}")
    unit = UNITS.get(metric.unit, "short")
    return Panel(title=title, help=help_line, lines=(line,), unit=unit, width=width)


def formula(
    title: str, help_line: str, expr: str, *, unit: str = "short", kind: Kind = "timeseries"
) -> Panel:
    """A panel of something computed from several metrics."""
    line = Line(expr=expr, legend="{{run}}")
    width = 3 if kind == "stat" else 8
    return Panel(title=title, help=help_line, lines=(line,), unit=unit, width=width, kind=kind)


def machine(title: str, help_line: str, *names: str, unit: str) -> Panel:
    """A panel of what Ray itself measures on each node."""
    lines = tuple(
        Line(
            expr=f"max by (NodeAddress) (ray_node_{name})",
            legend="{{NodeAddress}}" if len(names) == 1 else f"{name} {{{{NodeAddress}}}}",
        )
        for name in names
    )
    return Panel(title=title, help=f"{help_line} {OF_NODES}", lines=lines, unit=unit)


def gpu(title: str, help_line: str, name: str, *, unit: str, scale: str = "") -> Panel:
    """A panel of what Ray itself measures of each GPU; ``scale`` is appended to the query."""
    expr = f"max by (NodeAddress, GpuIndex) (ray_node_{name}){scale}"
    line = Line(expr=expr, legend="{{NodeAddress}} GPU {{GpuIndex}}")
    return Panel(title=title, help=f"{help_line} {OF_NODES}", lines=(line,), unit=unit)


ROWS = (
    Row(
        title="Now",
        panels=(
            number("Step", "run/step", width=3),
            number("Of", "run/total_steps", width=3),
            formula(
                "Time left",
                "Steps left times the mean step time of the last half hour; pauses are not in it.",
                f"({by_run('run/total_steps')} - {by_run('run/step')}) * on (run) "
                f"max by (run) (avg_over_time({select('train/step_time_s')}[30m]))",
                unit="s",
                kind="stat",
            ),
            number("Loss", "train/loss", width=3),
            number("Tokens/s", "train/tokens_per_s", width=3),
            number("MFU", "train/mfu", unit="percentunit", width=3),
            number("Attempt", "run/attempt", width=3),
            number("Workers", "run/world_size", width=3),
        ),
        is_folded=False,
    ),
    Row(
        title="Learning",
        panels=(
            curve("Loss", "train/loss", "eval/loss", "eval/ema_loss", width=12),
            curve("Gradient norm", "train/grad_norm", width=6, is_log=True),
            curve("Learning rate", "train/lr", width=6),
        ),
        is_folded=False,
    ),
    Row(
        title="Evaluation tasks",
        panels=(
            task_curve("Accuracy by task", having=".*/(acc|exact).*"),
            task_curve(
                "Perplexity and loss by task", having=".*(perplexity|loss|bits).*", is_log=True
            ),
        ),
    ),
    Row(
        title="Numbers inside the model",
        panels=(
            part_curve("Norm of weights", "train/group_weight_norm", is_log=True),
            part_curve("Norm of gradients", "train/group_grad_norm", is_log=True),
            part_curve("Blocks' outputs: standard deviation", "train/output_std", is_log=True),
            part_curve("Blocks' outputs: mean", "train/output_mean"),
            part_curve("Blocks' outputs: largest magnitude", "train/output_max_abs", is_log=True),
            part_curve(
                "Gradients by outputs: standard deviation", "train/output_grad_std", is_log=True
            ),
            part_curve("Gradients by outputs: mean", "train/output_grad_mean"),
            part_curve(
                "Gradients by outputs: largest magnitude", "train/output_grad_max_abs", is_log=True
            ),
            part_curve("Learning rates of roles", "train/role_lr"),
            part_curve("Loss of each validation set", "eval/set_loss"),
            part_curve("Perplexity of each validation set", "eval/set_perplexity", is_log=True),
            part_curve("Right answers of a head on each validation set", "eval/set_accuracy"),
            part_curve("Loss of the average on each validation set", "eval/set_ema_loss"),
            part_curve(
                "Perplexity of the average on each validation set",
                "eval/set_ema_perplexity",
                is_log=True,
            ),
            part_curve("Right answers of the average on each set", "eval/set_ema_accuracy"),
            curve("Loss scale", "train/loss_scale", "train/skipped_steps", is_log=True),
        ),
    ),
    Row(
        title="Speed",
        panels=(
            curve("Tokens/s of a step", "train/tokens_per_s"),
            curve("Tokens/s of a step, per worker", "train/tokens_per_s_per_worker"),
            formula(
                "Tokens/s of wall time",
                "Tokens over wall time, pauses included.",
                f"sum by (run) (rate({select('train/tokens')}[{WINDOW}]))",
            ),
            curve("Step time", "train/step_time_s"),
            formula(
                "Share of wall time in steps",
                "Steps per second times step time; 1 is a run that does nothing else.",
                f"max by (run) (deriv({select('run/step')}[{WINDOW}])) "
                f"* on (run) {by_run('train/step_time_s')}",
                unit="percentunit",
            ),
            curve("Pipeline bubble", "run/bubble", "run/simulated_bubble", unit="percentunit"),
            curve("Model TFLOP/s per worker", "train/tflops_per_worker"),
            curve("MFU", "train/mfu", unit="percentunit", width=8),
            curve("Packing efficiency", "data/packing_efficiency", unit="percentunit"),
            part_curve("Tokens read of each dataset", "data/source_tokens"),
            part_curve("Epochs of each dataset", "data/source_epochs"),
            curve("Wait for data from an object store", "data/wait_s"),
            curve("Bytes of shards that a node fetched", "data/fetched_bytes"),
            part_curve("Metrics of plug-ins", "plugin/metric"),
            curve("Imbalance of packs", "data/imbalance"),
            curve("Ranks of a pack", "data/pack_ranks", "data/most_pack_ranks"),
            curve("Wait for packs", "data/schedule_wait_s"),
            curve("Sent between context-parallel ranks", "comm/cp_sent_bytes"),
            curve(
                "Overlap of context-parallel transfers", "comm/cp_hidden_share", unit="percentunit"
            ),
            curve("Sent to experts and back", "comm/experts_sent_bytes"),
            curve("Overlap of expert dispatch", "comm/experts_hidden_share", unit="percentunit"),
            curve("Sent for an optimizer update, without weights", "comm/update_sent_bytes"),
            curve("Exposed communication of an update", "comm/update_exposed_s"),
        ),
    ),
    Row(
        title="Experts",
        panels=(
            part_curve("Busiest expert over the mean load", "moe/max_load", is_log=True),
            part_curve("Least busy expert over the mean load", "moe/min_load"),
            part_curve("Share of starved experts", "moe/starved_share"),
            part_curve("Share of choices dropped", "moe/drop_rate"),
            part_curve("Entropy of routers", "moe/router_entropy"),
            part_curve("Losses of routers", "moe/router_loss"),
        ),
    ),
    Row(
        title="Where a step's time goes, by rank",
        panels=(
            rank_curve("Forward", "worker/forward_s", needs=TIMELINE),
            rank_curve("Backward", "worker/backward_s", needs=TIMELINE),
            rank_curve("Transfers", "worker/transfer_s", needs=TIMELINE),
            rank_curve("Work time without waits", "worker/work_s"),
            curve("Slowest rank over the others of its stage", "worker/max_work_ratio"),
        ),
    ),
    Row(
        title="Memory, by rank",
        panels=(
            rank_curve("Peak", "memory/peak_bytes"),
            rank_curve("In use", "memory/allocated_bytes"),
            curve("Largest peak of all ranks", "memory/max_peak_bytes"),
        ),
    ),
    Row(
        title="Checkpoints",
        panels=(
            formula(
                "Steps since the newest checkpoint",
                "What a failure now would cost.",
                f"{by_run('run/step')} - {by_run('checkpoint/step')}",
            ),
            curve("Time of a save", "checkpoint/save_s", "checkpoint/stall_s"),
            curve("Size", "checkpoint/bytes", width=4),
            curve("Failed saves", "checkpoint/failed_saves", "checkpoint/skipped_saves", width=4),
            curve("Written share of the newest save", "checkpoint/written_share"),
            formula(
                "Steps since the newest snapshot",
                "What a lost worker or node would cost now; needs elastic.snapshot_every.",
                f"{by_run('run/step')} - {by_run('checkpoint/snapshot_step')}",
            ),
            curve("Time of a snapshot", "checkpoint/snapshot_s", "checkpoint/snapshot_stall_s"),
            curve("Snapshot of rank 0", "checkpoint/snapshot_bytes", width=4),
            curve("Ranks that lack a copy", "checkpoint/snapshot_lacking", width=4),
        ),
    ),
    Row(
        title="Attempts and failures",
        panels=(
            curve("Attempt", "run/attempt", width=6),
            curve("Detection and recovery", "run/detection_s", "run/recovery_s", width=6),
            curve("Steps recomputed", "run/lost_steps", width=6),
            curve("Goodput, at the end", "run/goodput", width=6, unit="percentunit"),
            curve("Bad steps and rollbacks", "run/bad_steps", "run/rollbacks", width=6),
            curve("Replica check", "train/divergence_check_s", width=6),
        ),
    ),
    Row(
        title="GPUs",
        panels=(
            gpu(
                "GPU in use",
                "Share of time in which a kernel ran.",
                "gpus_utilization",
                unit="percent",
            ),
            gpu("GPU memory in use", "Memory in use.", "gram_used", unit="bytes", scale=MIB),
            gpu(
                "GPU memory free", "Memory that is free.", "gram_available", unit="bytes", scale=MIB
            ),
            gpu("GPU power", "Power draw.", "gpu_power_milliwatts", unit="watt", scale=" / 1000"),
            gpu("GPU temperature", "Temperature.", "gpu_temperature_celsius", unit="celsius"),
        ),
    ),
    Row(
        title="Machines: CPU and memory",
        panels=(
            machine("CPU in use", "All cores.", "cpu_utilization", unit="percent"),
            machine("Host memory in use", "Memory in use.", "mem_used", unit="bytes"),
            machine("Host memory available", "Memory left.", "mem_available", unit="bytes"),
        ),
    ),
    Row(
        title="Machines: network and disk",
        panels=(
            machine("Sent", "All interfaces.", "network_send_speed", unit="Bps"),
            machine("Received", "All interfaces.", "network_receive_speed", unit="Bps"),
            machine(
                "Disk reads and writes",
                "All disks.",
                "disk_io_read_speed",
                "disk_io_write_speed",
                unit="Bps",
            ),
            machine("Disk free", "Of the disk with Ray's folder.", "disk_free", unit="bytes"),
        ),
    ),
)


def make_dashboard(rows: Iterable[Row]) -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "uid": "raymega-run",
        "title": "raymega run",
        "description": "Written by dashboards/generate.py from raymega/tracking/names.py.",
        "tags": ["raymega"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": [_datasource_variable(), _run_variable()]},
        "panels": list(_panels(rows)),
    }


def text() -> str:
    """The file's content."""
    return json.dumps(make_dashboard(ROWS), indent=1) + "\n"


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}


def _run_variable() -> dict[str, Any]:
    query = f"label_values({series(BY_NAME['run/step'])}, run)"
    return {
        "name": "run",
        "type": "query",
        "label": "Run",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "run"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Grafana's list: headings and panels, each with its place and a number of its own.

    The panels of a folded row are inside its heading, and take no room below it.
    """
    top, number_ = 0, 0
    for row in rows:
        number_ += 1
        heading = _heading(row, top=top, number_=number_)
        placed, bottom = _placed(row, top=top + 1, number_=number_)
        number_ += len(placed)
        yield heading | ({"panels": placed} if row.is_folded else {})
        if not row.is_folded:
            yield from placed
        top = top + 1 if row.is_folded else bottom


def _placed(row: Row, *, top: int, number_: int) -> tuple[list[dict[str, Any]], int]:
    """Return the row's panels, in lines of at most the screen's width, and the end of the last line."""
    found: list[dict[str, Any]] = []
    left, height = 0, 0
    for panel in row.panels:
        if left + panel.width > GRID_WIDTH:
            top, left, height = top + height, 0, 0
        height = STAT_HEIGHT if panel.kind == "stat" else PANEL_HEIGHT
        place = {"x": left, "y": top, "w": panel.width, "h": height}
        found.append(_panel(panel, place=place, number_=number_ + len(found) + 1))
        left += panel.width
    return found, top + height


def _heading(row: Row, *, top: int, number_: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": GRID_WIDTH, "h": 1}
    return {"id": number_, "type": "row", "title": row.title, "collapsed": row.is_folded,
            "gridPos": place, "panels": []}  # fmt: skip


def _panel(panel: Panel, *, place: dict[str, int], number_: int) -> dict[str, Any]:
    scale = {"type": "log", "log": 10} if panel.is_log else {"type": "linear"}
    custom = {"scaleDistribution": scale, "spanNulls": True, "showPoints": "auto"}
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "timeseries":
        defaults["custom"] = custom
    return {
        "id": number_,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": line.expr,
                "legendFormat": line.legend,
            }
            for index, line in enumerate(panel.lines)
        ],
    }


if __name__ == "__main__":
    DASHBOARD.write_text(text())
