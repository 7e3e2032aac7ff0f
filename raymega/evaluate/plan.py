"""Plan of an evaluation: a model on a grid of its own, for workers that hold weights and score requests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.load.adapted_base import BASE_REMEDY, START_FIELDS, open_base, start_of
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.config.grid_text import degrees_of, grid_overrides
from raymega.config.load import parse_mapping
from raymega.config.schema import Job, ModelSection
from raymega.convert.native import modules_of, tuned_model_of
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.evaluate.recording import OF_RUN
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.plan.validation.registry import job_faults

CPUS_OF_MANY = 0.1
"""CPUs that a worker reserves where the machine has fewer than there are workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """Options of an evaluation.

    Attributes:
        grid: Degrees of the grid, such as ``tp=2,pp=2``; empty is one rank.
        overrides: Texts ``section.field=value`` that override fields of the run's job.
        tokenizer: Tokenizer file; None looks for the model's.
        seq_len: Number of tokens that the model reads at once; 0 is the run's.
        stride: Number of tokens by which a window moves on; 0 is the task's own.
        limit: Number of documents, or windows, to evaluate; 0 is all.
        mlflow: Place of the metrics: ``run`` is the run's own MLflow, ``off`` none; else a tracking URI.
        is_for_export: Whether the plan is of an exported model alone, of which no grid reads a row.
    """

    grid: str = ""
    overrides: tuple[str, ...] = ()
    tokenizer: Path | None = None
    seq_len: int = 0
    stride: int = 0
    limit: int = 0
    mlflow: str = OF_RUN
    is_for_export: bool = False


def plan_of(checkpoint: Checkpoint, options: EvalOptions) -> RunPlan:
    """Return the plan of an evaluation: the checkpoint's model and number format, on the options' grid.

    A checkpoint of adapters is evaluated with them, over the base that its run began with.

    Raises:
        ConfigError: The grid is not legal for the model, or the base of adapters is missing.
    """
    manifest = checkpoint.manifest
    model = tuned_model_of(manifest)
    values = {
        "seq_len": options.seq_len or _saved(manifest, "data", "seq_len", 0),
        "dtype": _saved(manifest, "precision", "dtype", "float32"),
        "device": _saved(manifest, "cluster", "device", "cpu"),
        # an evaluation uses the family alone of a run's plug-ins
        "plugins": modules_of(manifest) if "." in model.family else (),
        "start": start_of(manifest) if model.lora.r else {},
    }
    plan = plan_on(model, options, values)
    if model.lora.r:
        start = plan.job.checkpoint.model_dump(mode="json")
        open_base(checkpoint, plan.job.model, start=start, remedy=BASE_REMEDY)
    return plan


def plan_on(
    model: ModelSection,
    options: EvalOptions,
    values: Mapping[str, Any],
    *,
    name: str = "evaluation",
) -> RunPlan:
    """Return the plan of an evaluation of ``model`` on the options' grid.

    Args:
        model: Model to evaluate.
        options: Grid and overrides.
        values: Length ``seq_len``, ``dtype`` and ``device`` of the run; ``cpus`` of a worker, modules of
            ``plugins`` and the base of adapters, ``start``, if given.
        name: Name of the workers in Ray.

    Raises:
        ConfigError: The grid is not legal for the model.
    """
    raise_faults(ConfigError, next_token_faults(model, is_for_export=options.is_for_export))
    grid, degrees = grid_overrides(options.grid), degrees_of(options.grid)
    cpus = values.get("cpus") or (os.cpu_count() or 1) // prod(degrees.values()) or CPUS_OF_MANY
    raw: dict[str, Any] = {
        "run": {"name": name, "steps": 1, "eval_samples": 0},
        "model": model.model_dump(mode="json")
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "loss": "cross_entropy"}
        # what was trained whole beside adapters is read from their checkpoint, and is no code of the base
        | {"freeze": (), "train": model.train if model.lora.r else (), "lora": _lora(model)},
        # rows of several requests, whatever the run's rows were
        "data": {
            "path": "synthetic",
            "seq_len": min(values["seq_len"] or model.longest_row, model.max_positions),
            "global_batch_size": 2**14,
            "packing": "best_fit",
            "document_multiple": 2 * degrees["cp"],
        },
        "optimizer": {"lr": 1e-3},
        "precision": {"dtype": values["dtype"]},
        "checkpoint": {"every": 0, **values.get("start", {})},
        "tracking": {"mlflow_uri": "off"},
        "plugins": {"modules": values.get("plugins", ())},
        "cluster": {
            "device": values["device"],
            "cpus_per_worker": cpus,
        },
    }
    parsed = parse_mapping(raw).with_overrides([*grid, *options.overrides])
    raise_faults(ConfigError, [*parsed.faults, *job_faults(parsed.values)])
    return make_plan(parsed.job())


def _lora(model: ModelSection) -> dict[str, Any]:
    """Return the adapters without dropout; the plain section where there are none."""
    return (model.lora.model_copy(update={"lora_dropout": 0.0})).model_dump(mode="json")


def next_token_faults(model: ModelSection, *, is_for_export: bool = False) -> list[Fault]:
    """Return the fault of a model that scores no next token of a row, as its export may."""
    if model.head.is_on:
        return [
            Fault(
                fact=f"the checkpoint's model.head.kind={model.head.kind}",
                rule="tasks and generation read the next token's scores, and this head has no vocabulary",
                remedy="train with run.eval_samples above 0, which measures its loss and accuracy, or "
                "export it with `raymega convert hf-export`",
            )
        ]
    parts = parts_of(model)
    if parts.is_encoder_decoder and not is_for_export:
        return [
            Fault(
                fact=f"the checkpoint's model.family={model.family} is an encoder-decoder",
                rule="tasks and grids read one stream of tokens, and it has two",
                remedy="train with run.eval_samples above 0, and generate without --grid",
            )
        ]
    if parts.is_causal:
        return []
    return [
        Fault(
            fact=f"the checkpoint's model.family={model.family} is an encoder",
            rule="tasks and generation read the next token's scores, and an encoder predicts masked tokens",
            remedy="train with run.eval_samples above 0, which measures the loss of masked tokens, or "
            "export it with `raymega convert hf-export`",
        )
    ]


def plan_beside(job: Job) -> RunPlan:
    """Return the plan of the workers of ``run.eval_tasks_on=beside``.

    Raises:
        ConfigError: ``run.eval_tasks_grid`` is not legal for the model.
    """
    values = {
        "seq_len": job.data.seq_len,
        "dtype": job.precision.dtype,
        "device": job.cluster.device,
        "cpus": job.cluster.cpus_per_worker,
        "plugins": job.plugins.modules,
        "start": {name: getattr(job.checkpoint, name) for name in START_FIELDS}
        if job.model.lora.r
        else {},
    }
    options = EvalOptions(grid=job.run.eval_tasks_grid)
    return plan_on(job.model, options, values, name=f"{job.run.name[:90]}-tasks")


def _saved(manifest: Manifest, section: str, field: str, default: Any) -> Any:
    """Return a field of the run's job, or ``default`` where the manifest does not have it."""
    values = manifest.job.get(section)
    return values.get(field, default) if isinstance(values, dict) else default
