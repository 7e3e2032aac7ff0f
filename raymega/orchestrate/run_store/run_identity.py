"""Decides whether a changed job continues a run: model, seed, data and kind of optimizer must stay.

It only compares values; ``run_store/journal.py`` stores a run's identity.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raymega.config.data import DataSource, source_name
from raymega.config.fields import by_path
from raymega.config.schema import (
    DataSection,
    DistillationSection,
    Job,
    ModelSection,
    OptimizerSection,
    PreferenceSection,
)
from raymega.data.blends.blend import whole_weights
from raymega.data.blends.mixture import first_sample
from raymega.data.checks import dataset_identity
from raymega.data.distillation.stored_logits import stored_how
from raymega.data.preference.stored_reference import reference_digests
from raymega.errors import Fault
from raymega.plan.batch import samples_after
from raymega.plan.memory.state_bytes import DTYPE_BYTES
from raymega.plugins import Kind, find, is_known

LOGITS = "distillation.stored_logits"
"""Place in an identity of what a teacher's stored logits are of, by dataset."""
DATASET_FIELDS = ("path", "sources", "stages", "validation", "cache_bytes")
"""Fields of the data section that are not compared as they are written."""
STORED = "preference.stored_log_probs"
"""Place in an identity of the digests of stored references, by dataset and split."""
WITHOUT_EFFECT = ("tensor_parallel", "image_share")
"""Fields of a vision section that change no number of a run: how ranks share its work, and a prediction."""
KEPT_OF_OPTIMIZER = {"name", "state_dtype", "ema_decay"}


def identity_faults(
    name: str, identity: Mapping[str, Any], job: Job, *, step: int = 0
) -> list[Fault]:
    """Return a fault for each field of ``job`` that differs from the ``identity`` of run ``name``.

    Stages of the data that begin after the run's ``step`` may differ.
    """
    then, now = by_path(identity), by_path(identity_of(job))
    # a field that the record lacks is newer than the record, which was begun with its default
    then = by_path(_DEFAULTS) | then
    done = samples_after(step, job.data)
    for values in (then, now):
        stages: Any = values["data.stages"]
        values["data.stages"] = [stage for stage in stages if stage[0] < done]
    return [
        Fault(
            fact=f"{path}={now[path]!r}",
            rule=f"run {name!r} was begun with {path}={then[path]!r}, and a run keeps its "
            "model, seed, data, optimizer.name and optimizer.state_dtype",
            remedy=_way_back(path, then[path]),
        )
        for path in sorted(now)
        if path in then and now[path] != then[path]
    ]


def _way_back(path: str, value: object) -> str:
    if path.startswith(f"{LOGITS}."):
        return "store those of before again (`raymega data teacher`), or take another run.name"
    if path.startswith(f"{STORED}."):
        return "compute it with the checkpoint of before (`raymega data reference`), or take another run.name"
    return f"set {path}={value} to continue it, or take another run.name"


def identity_of(job: Job) -> dict[str, Any]:
    """Return the job's values that identify a run, as plain JSON values."""
    plain = identity_without_content(job)
    # data by content instead of path: a dataset may move, but not change
    if not job.data.sources:
        plain["data"]["content"] = dataset_identity(job.data.path)
    else:
        plain["data"]["content"] = _contents(job.data.sources)
    plain["data"]["stages"] = [
        [first_sample(stage.from_tokens, job.data), _contents(stage.sources)]
        for stage in job.data.stages
    ]
    # the loss depends on the stored reference, so a change of it is another run
    if job.preference.needs_reference and job.preference.reference == "stored":
        # by content: those of datasets that only one of two jobs reads are not compared
        section, _, field = STORED.partition(".")
        plain[section][field] = {
            dataset_identity(path): reference_digests(path) for path in job.dataset_paths
        }
    if job.distillation.is_on and not job.distillation.is_live:
        section, _, field = LOGITS.partition(".")
        plain[section][field] = {
            dataset_identity(path): stored_how(path) for path in job.data.datasets
        }
    return plain


def identity_without_content(job: Job) -> dict[str, Any]:
    """Return a job's identity as far as its data need not be read for it."""
    kept: Any = {
        "model": True,
        "data": True,
        "preference": True,
        # a teacher is known by its checkpoint, which may move
        "distillation": set(DistillationSection.model_fields) - {"teacher_checkpoint"},
        "run": {"seed"},
        "optimizer": KEPT_OF_OPTIMIZER,
    }
    plain = dict(job.model_dump(mode="json", include=kept))
    for field in DATASET_FIELDS:
        del plain["data"][field]
    for model in (plain["model"], plain["distillation"]["teacher_model"]):
        for field in WITHOUT_EFFECT if isinstance(model, dict) else ():
            del model["vision"][field]
    plain["plugins"] = {"options": _options_of(job)}
    return plain


def _options_of(job: Job) -> dict[str, Any]:
    """Return the options, with their defaults, of the plug-ins that make a job's data and its loss."""
    sources = [source_name(path) for path in job.data.datasets]
    used: list[tuple[Kind, str]] = [
        ("loss", job.model.loss),
        *(("data_source", name) for name in sources if name),
        *(("transform", name) for name in job.data.transforms),
    ]
    return {
        name: find(kind, name).option_values(job.plugins.options.get(name, {}))
        for kind, name in used
        if is_known(kind, name) and find(kind, name).options
    }


def whole_identity(identity: dict[str, Any]) -> dict[str, Any]:
    """Return ``identity`` if it can be compared with that of a job.

    Raises:
        ValueError: A part is missing or of another form.
    """
    for part in ("model", "data", "run", "optimizer"):
        if not isinstance(identity.get(part), dict):
            raise ValueError(f"identity.{part} is no object")
    for stage in identity["data"].get("stages", []):
        if not isinstance(stage, list) or not stage or not isinstance(stage[0], int):
            raise ValueError("identity.data.stages has no list of samples and contents")
    return identity


def _contents(sources: Sequence[DataSource]) -> list[list[str | int]]:
    """Return identity and weight of each source of a blend; weights that mean the same are equal."""
    weights = whole_weights([source.weight for source in sources])
    return [
        [dataset_identity(source.path), weight]
        for source, weight in zip(sources, weights, strict=True)
    ]


_DEFAULTS: dict[str, Any] = {
    name: {
        field: json.loads(json.dumps(info.default, default=lambda part: part.model_dump()))
        for field, info in section.model_fields.items()
        if not info.is_required() and field not in {*DATASET_FIELDS} - {"stages"}
    }
    for name, section in (
        ("model", ModelSection),
        ("data", DataSection),
        ("preference", PreferenceSection),
        ("distillation", DistillationSection),
        ("optimizer", OptimizerSection),
    )
}
"""Default of each optional field, in JSON's types, for records of versions that lacked the field."""


def precision_faults(saved: Mapping[str, Any], job: Job) -> Iterator[Fault]:
    """Return a fault if the checkpoint's master weights are wider than the job's, else none."""
    # a checkpoint without a known dtype is not refused
    before = saved.get("precision", {}).get("dtype")
    now = job.precision.dtype
    if before in DTYPE_BYTES and _master_bytes(before) > _master_bytes(now):
        yield Fault(
            fact=f"precision.dtype={now!r}",
            rule=f"the run's checkpoint was written with {before!r}, whose masters are wider, and a "
            "run does not drop digits by itself",
            remedy=f"set precision.dtype={before}, or take another run.name",
        )


def _master_bytes(dtype: str) -> int:
    return max(4, DTYPE_BYTES[dtype])
