"""Fields that nothing goes by unless another field says so: one table, one rule.

A value that was set by hand and does nothing is a mistake of whoever set it. Fields of schedules, and
those that say how layers are placed, have such rules with their owners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raymega.config.schema import Job
from raymega.errors import Fault


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldDependency:
    """What fields need in order to mean something.

    Attributes:
        reads: Dotted paths of the fields that decide.
        holds: Gets their values; whether the others are read.
        words: What to set, as a job says it.
    """

    reads: tuple[str, ...]
    holds: Callable[..., bool]
    words: str


def _is(path: str, value: str) -> FieldDependency:
    """``path`` has exactly this value."""
    return FieldDependency(
        reads=(path,), holds=lambda found: bool(found == value), words=f"{path}={value}"
    )


def _optimizer(*names: str) -> FieldDependency:
    """``optimizer.name`` is one of these."""
    return FieldDependency(
        reads=("optimizer.name",),
        holds=lambda found: found in names,
        words=f"optimizer.name={' or '.join(names)}",
    )


SCALED_ROPE = FieldDependency(
    reads=("model.rope_scaling",),
    holds=lambda scaling: scaling != "none",
    words="model.rope_scaling=llama3 or yarn",
)
FLOAT16 = _is("precision.dtype", "float16")
BETAS, MOMENTUM = _optimizer("adamw", "lion", "muon"), _optimizer("sgd", "muon")
SNAPSHOTS = FieldDependency(
    reads=("elastic.snapshot_every",),
    holds=lambda every: every > 0,
    words="elastic.snapshot_every above 0",
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
HYBRID = FieldDependency(
    reads=("parallel.cp", "parallel.cp_method"),
    holds=lambda cp, method: cp > 1 and method == "hybrid",
    words="parallel.cp_method=hybrid and parallel.cp above 1",
)

PARTNERS: Mapping[str, FieldDependency] = {
    "data.packing_window": _is("data.packing", "best_fit"),
    "elastic.snapshot_during_save": SNAPSHOTS,
    "elastic.snapshot_timeout_s": SNAPSHOTS,
    "elastic.snapshot_backpressure": SNAPSHOTS,
    "memory.recompute_every": _is("memory.recompute", "full"),
    "memory.recompute_parts": _is("memory.recompute", "selective"),
    "model.mtp_loss_scaling_factor": FieldDependency(
        reads=("model.num_nextn_predict_layers",),
        holds=lambda depth: depth > 0,
        words="model.num_nextn_predict_layers above 0",
    ),
    "model.rope_theta": FieldDependency(
        reads=("model.family",),
        holds=lambda family: family != "gpt2",
        words="model.family=llama, qwen2 or qwen3",
    ),
    "model.rope_factor": SCALED_ROPE,
    "model.rope_high_freq_factor": _is("model.rope_scaling", "llama3"),
    "model.rope_low_freq_factor": _is("model.rope_scaling", "llama3"),
    "model.rope_beta_fast": _is("model.rope_scaling", "yarn"),
    "model.rope_beta_slow": _is("model.rope_scaling", "yarn"),
    "model.rope_mscale": _is("model.rope_scaling", "yarn"),
    "model.rope_original_positions": SCALED_ROPE,
    "optimizer.beta1": BETAS,
    "optimizer.beta2": BETAS,
    "optimizer.eps": _optimizer("adamw", "muon"),
    "optimizer.head_lr": FieldDependency(
        reads=("model.tie_word_embeddings",),
        holds=lambda is_tied: not is_tied,
        words="model.tie_word_embeddings=false",
    ),
    "optimizer.momentum": MOMENTUM,
    "optimizer.newton_schulz_steps": _optimizer("muon"),
    "parallel.hierarchical_cp_size": HYBRID,
    "parallel.cp_method": CONTEXT,
    "parallel.moe_token_dispatcher_type": EXPERTS_APART,
    "parallel.overlap_moe_expert_parallel_comm": EXPERTS_APART,
    "precision.fp8_end_blocks": FieldDependency(
        reads=("precision.fp8",),
        holds=lambda recipe: recipe != "none",
        words="precision.fp8=rowwise or tensorwise",
    ),
    "precision.loss_scale": FLOAT16,
    "precision.loss_scale_hysteresis": FLOAT16,
    "precision.loss_scale_window": FLOAT16,
    "precision.min_loss_scale": FLOAT16,
}
"""Which fields need whom."""


def default_of(path: str) -> Any:
    """What the field is when a job does not set it."""
    section, _, field = path.partition(".")
    annotation: Any = Job.model_fields[section].annotation
    return annotation.model_fields[field].default


def unused_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``values`` (dotted path to value) that differ from their default and are not read.

    Returns:
        Their defaults: with these the job is the same.
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
    """The same job, every field that nothing goes by at its default: for whoever changes a layout."""
    sections: dict[str, dict[str, Any]] = {}
    for path, default in _DEFAULTS.items():
        if _value(job, path) == default:
            continue
        partner = PARTNERS[path]
        if not partner.holds(*(_value(job, other) for other in partner.reads)):
            section, _, field = path.partition(".")
            sections.setdefault(section, {})[field] = default
    changes = {
        name: getattr(job, name).model_copy(update=fields) for name, fields in sections.items()
    }
    return job.model_copy(update=changes) if changes else job


def unused_faults(values: Mapping[str, Any]) -> list[Fault]:
    """One fault for each field that was set and that nothing goes by."""
    faults = []
    for path, default in unused_values(values).items():
        partner = PARTNERS[path]
        found = ", ".join(f"{other}={_as_yaml(values[other])}" for other in partner.reads)
        faults.append(
            Fault(
                fact=f"{path}={_as_yaml(values[path])} with {found}",
                rule=f"nothing goes by it without {partner.words}",
                remedy=f"remove it (it is {_as_yaml(default)} then), or set {partner.words}",
            )
        )
    return faults


def _as_yaml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _value(job: Job, path: str) -> Any:
    section, _, field = path.partition(".")
    return getattr(getattr(job, section), field)


_DEFAULTS = {path: default_of(path) for path in PARTNERS}
