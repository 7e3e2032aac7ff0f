"""Check fields that have no effect unless another field enables them: one table, one rule.

A value that was set by hand and has no effect is a mistake. Such rules for fields of schedules are in
``raymega/schedule/table.py``, and those for the placement of layers in ``raymega/plan/stages.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raymega.config.fields import Section
from raymega.config.schema import Job
from raymega.errors import Fault
from raymega.plan.layers.family_parts import CLAMPED, family_parts
from raymega.plan.memory.optimizer_state import KINDS, kind_of
from raymega.plan.zero_levels import can_outlive_loss
from raymega.plugins import is_known


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldDependency:
    """Condition on other fields under which a field has an effect.

    Attributes:
        reads: Dotted paths of the fields that decide.
        holds: Function of their values that returns whether the condition holds.
        words: Setting that meets the condition, as text for a remedy.
    """

    reads: tuple[str, ...]
    holds: Callable[..., bool]
    words: str


SWITCHES = ("kind",)
"""Fields of a section inside a section that a message tells."""


def _is(path: str, *values: str | bool) -> FieldDependency:
    """Return the condition that ``path`` has one of these values."""
    words = f"{path}={' or '.join(map(_as_yaml, values))}"
    return FieldDependency(reads=(path,), holds=lambda found: found in values, words=words)


def _optimizer_reads(field: str) -> FieldDependency:
    """Return the condition that the optimizer reads ``field``; one that is unknown has a fault of its own."""
    readers = [name for name, kind in KINDS.items() if field in kind.fields]
    return FieldDependency(
        reads=("optimizer.name",),
        holds=lambda name: not is_known("optimizer", name) or field in kind_of(name).fields,
        words=f"optimizer.name={' or '.join(readers)}",
    )


def _is_positive(path: str) -> FieldDependency:
    """Return the condition that ``path`` is more than 0."""
    return FieldDependency(
        reads=(path,), holds=lambda found: bool(found > 0), words=f"{path} above 0"
    )


def _as_yaml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    # of a section what turns it on: its other fields would fill the message
    if isinstance(value, Section):
        return f"{{{', '.join(f'{k}: {_as_yaml(v)}' for k, v in value if k in SWITCHES)}}}"
    return f"{value:g}" if isinstance(value, float) else str(value)


SCALED_ROPE = _is("model.rope_scaling", "llama3", "yarn")
STRETCHED_ROPE = _is("model.rope_scaling", "linear", "llama3", "yarn")
LLAMA3, YARN = _is("model.rope_scaling", "llama3"), _is("model.rope_scaling", "yarn")
CLAMPED_GATE = FieldDependency(
    reads=("model.family",),
    holds=lambda family: family_parts(family).activation == CLAMPED,
    words="model.family=gpt_oss",
)
SAMPLES = _is_positive("run.samples_every")
FLOAT16 = _is("precision.dtype", "float16")
SNAPSHOTS = _is_positive("elastic.snapshot_every")
DISTILLED = _is("distillation.loss_type", "forward_kl", "reverse_kl")
EVALUATED_AVERAGE = FieldDependency(
    reads=("optimizer.ema_decay", "run.eval_samples"),
    holds=lambda decay, samples: decay > 0 and samples > 0,
    words="optimizer.ema_decay above 0, 0.999 for example, and run.eval_samples above 0",
)
CONTEXT = FieldDependency(
    reads=("parallel.cp", "parallel.dynamic_cp"),
    holds=lambda cp, is_dynamic: cp > 1 or is_dynamic,
    words="parallel.cp above 1",
)
EXPERTS_APART = FieldDependency(
    reads=("parallel.ep", "parallel.etp"),
    holds=lambda ep, etp: ep * etp > 1,
    words="parallel.ep or parallel.etp above 1",
)
SHARED_IMAGES = FieldDependency(
    reads=("model.vision", "parallel.dp"),
    holds=lambda vision, dp: vision.is_on and dp > 1,
    words="model.vision and parallel.dp above 1",
)
CUT_POSITIONS = FieldDependency(
    reads=("parallel.sequence_parallel", "parallel.tp"),
    holds=lambda is_cut, tp: is_cut and tp > 1,
    words="parallel.sequence_parallel=true and parallel.tp above 1",
)
HYBRID = FieldDependency(
    reads=("parallel.cp", "parallel.cp_method"),
    holds=lambda cp, method: cp > 1 and method == "hybrid",
    words="parallel.cp_method=hybrid and parallel.cp above 1",
)
REPLICAS = FieldDependency(
    reads=(
        "parallel.ep", "parallel.dynamic_cp", "parallel.sharding",
        "parallel.data_parallel_shard_degree", "parallel.cp", "memory.offload",
    ),
    holds=can_outlive_loss,
    words="parallel.ep=1, parallel.dynamic_cp=false, the optimizer outside memory.offload, and parallel.sharding=none "
    "or, without cp, parallel.data_parallel_shard_degree below parallel.dp",
)  # fmt: skip

PARTNERS: Mapping[str, FieldDependency] = {
    # data, elastic, memory
    "run.eval_ema": EVALUATED_AVERAGE,
    "run.eval_tasks_grid": _is("run.eval_tasks_on", "beside"),
    "data.packing_window": _is("data.packing", "best_fit"),
    "elastic.snapshot_during_save": SNAPSHOTS,
    "elastic.snapshot_timeout_s": SNAPSHOTS,
    "elastic.snapshot_backpressure": SNAPSHOTS,
    "elastic.on_replica_loss": REPLICAS,
    "memory.recompute_every": _is("memory.recompute", "full"),
    "memory.recompute_parts": _is("memory.recompute", "selective"),
    # model
    "model.label_smoothing": _is("model.loss", "cross_entropy"),
    "model.z_loss": _is("model.loss", "cross_entropy"),
    "model.mtp_loss_scaling_factor": _is_positive("model.num_nextn_predict_layers"),
    "model.rope_theta": FieldDependency(
        reads=("model.family",),
        holds=lambda family: family_parts(family).has_rope,
        words="another model.family",
    ),
    "model.rope_factor": STRETCHED_ROPE,
    "model.rope_high_freq_factor": LLAMA3,
    "model.rope_low_freq_factor": LLAMA3,
    "model.rope_beta_fast": YARN,
    "model.rope_beta_slow": YARN,
    "model.rope_mscale": YARN,
    "model.rope_original_positions": SCALED_ROPE,
    "model.rope_truncate": YARN,
    "model.swiglu_alpha": CLAMPED_GATE,
    "model.swiglu_limit": CLAMPED_GATE,
    # distillation
    "distillation.weight": DISTILLED,
    "distillation.temperature": DISTILLED,
    "distillation.teacher": DISTILLED,
    "distillation.teacher_checkpoint": DISTILLED,
    "distillation.top_k": _is("distillation.teacher", "stored"),
    # run
    "run.sample_prompts": SAMPLES,
    "run.sample_images": SAMPLES,
    "run.sample_temperature": SAMPLES,
    "run.sample_tokens": SAMPLES,
    # optimizer
    "optimizer.beta1": _optimizer_reads("beta1"),
    "optimizer.beta2": _optimizer_reads("beta2"),
    "optimizer.eps": _optimizer_reads("eps"),
    "optimizer.head_lr": _is("model.tie_word_embeddings", False),
    "optimizer.momentum": _optimizer_reads("momentum"),
    "optimizer.newton_schulz_steps": _optimizer_reads("newton_schulz_steps"),
    # parallel, precision
    "parallel.hierarchical_cp_size": HYBRID,
    "parallel.cp_method": CONTEXT,
    "parallel.moe_token_dispatcher_type": EXPERTS_APART,
    "parallel.overlap_moe_expert_parallel_comm": EXPERTS_APART,
    "parallel.tp_comm_overlap": CUT_POSITIONS,
    "parallel.balance_images": SHARED_IMAGES,
    "precision.fp8_end_blocks": _is("precision.fp8", "rowwise", "tensorwise"),
    "precision.loss_scale": FLOAT16,
    "precision.loss_scale_hysteresis": FLOAT16,
    "precision.loss_scale_window": FLOAT16,
    "precision.min_loss_scale": FLOAT16,
}
"""Condition of each field that needs one, by dotted path."""
PARTNER_FIELDS = tuple(
    {path: None for field, partner in PARTNERS.items() for path in (field, *partner.reads)}
)
"""Fields that have a condition or are read by one, each once."""


def default_of(path: str) -> Any:
    """Return the value of a field in a job that does not set it."""
    section, _, field = path.partition(".")
    annotation: Any = Job.model_fields[section].annotation
    return annotation.model_fields[field].default


def unused_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``values`` (dotted path to value) that are set and have no effect.

    Returns:
        Their defaults, by path: with these the job is the same.
    """
    return {
        path: _DEFAULTS[path]
        for path, partner in PARTNERS.items()
        if path in values
        and values[path] != _DEFAULTS[path]
        and all(other in values for other in partner.reads)
        and not partner.holds(*(values[other] for other in partner.reads))
    }


def settled(job: Job) -> Job:
    """Return the job with every field without effect at its default, for searches over layouts."""
    values = {
        path: getattr(getattr(job, section), field) for path, (section, field) in _PLACES.items()
    }
    changes: dict[str, dict[str, Any]] = {}
    for path, default in unused_values(values).items():
        section, field = _PLACES[path]
        changes.setdefault(section, {})[field] = default
    return job.with_values(**changes) if changes else job


def unused_faults(values: Mapping[str, Any]) -> list[Fault]:
    """Return a fault for each field that is set and has no effect."""
    faults = []
    for path, default in unused_values(values).items():
        partner = PARTNERS[path]
        found = ", ".join(f"{other}={_as_yaml(values[other])}" for other in partner.reads)
        faults.append(
            Fault(
                fact=f"{path}={_as_yaml(values[path])} with {found}",
                rule=f"it has no effect without {partner.words}",
                remedy=f"remove it (it is {_as_yaml(default)} then), or set {partner.words}",
            )
        )
    return faults


_DEFAULTS = {path: default_of(path) for path in PARTNERS}
_PLACES = {
    path: path.split(".")
    for target, partner in PARTNERS.items()
    for path in (target, *partner.reads)
}
"""Section and field of each path of the table, split once: searches settle thousands of jobs."""
