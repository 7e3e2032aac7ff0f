"""Derives the job of a live teacher from that of the run: its model on the same ranks, in forward passes alone.

`raymega.plan.run_plan` makes its plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raymega.config.lora import LoraSection
from raymega.config.schema import Job, ModelSection

UNTRAINED: Mapping[str, Any] = {
    "lora": LoraSection(), "freeze": (), "train": (), "num_nextn_predict_layers": 0, "loss": "cross_entropy",
    "label_smoothing": 0.0, "z_loss": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0, "neftune_noise_alpha": 0.0,
}  # fmt: skip
"""Fields of a model that training alone reads, with their values in a teacher."""
RESET = {
    "distillation": ("loss_type", "weight", "temperature", "teacher", "teacher_checkpoint", "teacher_model", "top_k"),
    "memory": ("recompute", "recompute_parts", "recompute_every", "offload"),
    "parallel": (
        "stages", "first_stage_layers", "last_stage_layers", "is_embedding_a_layer", "is_loss_a_layer",
        "overlap_moe_expert_parallel_comm",
    ),
    "precision": ("fp8", "fp8_end_blocks"),
    "run": ("samples_every", "eval_tasks"),
    "checkpoint": ("init_from", "init_adapter", "init_upcycle", "init_rename", "reinit", "init_ignore", "allow_changed"),
}  # fmt: skip
"""Fields that have their default in a teacher's job: those of training, and of the run's own layers."""
OF_EXPERTS = ("ep", "etp", "moe_token_dispatcher_type")
"""Fields of the section ``parallel`` that a model without experts has no use for."""


def has_teacher(values: Mapping[str, Any]) -> bool:
    """Return whether a job with these values, by dotted path, has a live teacher with a model of its own."""
    is_on = values.get("distillation.loss_type", "none") != "none"
    is_live = values.get("distillation.teacher") == "live"
    return is_on and is_live and isinstance(values.get("distillation.teacher_model"), ModelSection)


def teacher_job(job: Job) -> Job:
    """Return the job of the live teacher of ``job``, whose model is trained as if it were the run's own.

    Values are not validated; with the grid of ``job`` it has a plan if the rules of a job hold for it.
    """
    changes: dict[str, dict[str, Any]] = {
        section: {field: _default_of(section, field) for field in fields}
        for section, fields in RESET.items()
    }
    model = job.distillation.model_of_teacher(job.model).model_copy(update=dict(UNTRAINED))
    # the ranks of experts hold a teacher without experts as any other ranks do
    if not model.moe.num_experts:
        changes["parallel"] |= {field: _default_of("parallel", field) for field in OF_EXPERTS}
    # initial values unlike the model's own, where no checkpoint is read
    changes["run"]["seed"] = job.run.seed + 1
    return job.with_values(**changes).model_copy(update={"model": model})


def teacher_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the teacher's job by dotted path, for the rules of a job.

    Args:
        values: Values of the run's job for which :func:`has_teacher` holds; fields may be missing.
    """
    model = values["distillation.teacher_model"].model_copy(update=dict(UNTRAINED))
    fields = [f"{section}.{field}" for section, fields in RESET.items() for field in fields]
    if not model.moe.num_experts:
        fields += [f"parallel.{field}" for field in OF_EXPERTS]
    changed = {path: _default_of(*path.split(".")) for path in fields if path in values}
    own = {f"model.{field}": getattr(model, field) for field in ModelSection.model_fields}
    return {**values, **changed, **own}


def _default_of(section: str, field: str) -> Any:
    annotation: Any = Job.model_fields[section].annotation
    return annotation.model_fields[field].default
