"""Checks of a job before it trains: what lies outside of the job file, in stores, checkpoints and datasets.

:func:`with_pins` notes which manifests of others the ranks read, and :func:`outside_faults` returns what would end the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from raymega.checkpoint.format.manifest import valid_checkpoints
from raymega.checkpoint.load.fingerprint import BASE, TEACHER, origin_faults
from raymega.checkpoint.load.init_from import ADAPTER, resume_faults, start_faults
from raymega.checkpoint.load.pinned_source import pin_faults, pinned, teacher_faults
from raymega.config.fields import Section
from raymega.config.load import ParsedJob
from raymega.config.schema import (
    CheckpointSection,
    DataSection,
    DistillationSection,
    ModelSection,
    ScheduleSection,
)
from raymega.data.checks import training_faults
from raymega.data.distillation.stored_logits import stored_how
from raymega.data.text_codec import sample_prompt_faults
from raymega.errors import Fault
from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.run_store.foreign_runs import warn_of_driver
from raymega.plan.distillation.teacher import UNTRAINED
from raymega.storage.registry import (
    apart_faults,
    folder_faults,
    open_store,
    store_faults,
)
from raymega.tracking.trackers.selection import tracker_faults

T = TypeVar("T", bound=Section)


def with_pins(parsed: ParsedJob) -> ParsedJob:
    """Return the job with the manifests of others that its ranks read: all read the same one, now and in each restart."""
    values, uri, read = parsed.values, _run_uri(parsed.values), _pinned_fields(parsed.values)
    fields = [each for each in sorted({BASE, ADAPTER, *read}) if values.get(each, "none") != "none"]
    if parsed.faults or not fields or store_faults(uri):
        return parsed
    own = open_store(uri)
    # a new run begins with weights and adapters as well
    if not valid_checkpoints(own):
        read += [BASE, ADAPTER]
    pins = {each: pinned(values[each], own, field=each, is_read=each in read) for each in fields}
    for field in sorted({*read} & pins.keys()):
        warn_of_driver(field, pins[field], SystemClock())
    return parsed.with_overrides(f"{field}={json.dumps(pin)}" for field, pin in pins.items())


def _pinned_fields(values: Mapping[str, Any]) -> list[str]:
    """Return the fields that name checkpoints which the job reads again in each restart."""
    model, teacher = (
        _section(values, "model", ModelSection),
        _section(values, "distillation", DistillationSection),
    )
    is_read = {BASE: model and model.lora.r > 0, TEACHER: teacher and teacher.is_live}
    return [field for field, is_due in is_read.items() if is_due]


def _run_uri(values: Mapping[str, Any]) -> str:
    """Return the URI of the run's store; empty where the job does not say."""
    if "checkpoint.uri" not in values:
        return ""
    run = f"/{values['run.name']}" if "run.name" in values else ""
    return f"{values['checkpoint.uri'].rstrip('/')}{run}"


def outside_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the faults of data and store, as far as the job's fields parsed."""
    yield from training_faults(values) or sample_prompt_faults(values)
    yield from tracker_faults(values)
    if values.get("checkpoint.local_uri", "none") != "none":
        yield from _near_faults(values["checkpoint.local_uri"], values.get("checkpoint.uri"))
    yield from _teacher_faults(values)
    # store of the run
    is_resumed = False
    if uri := _run_uri(values):
        outside = store_faults(uri)
        yield from outside
        # A run with checkpoints of its own resumes from them, whatever checkpoint.init_from says.
        is_resumed = not outside and bool(valid_checkpoints(open_store(uri)))
        if is_resumed:
            model = _section(values, "model", ModelSection)
            schedule = _section(values, "schedule", ScheduleSection)
            if model and schedule:
                size, fp8 = schedule.micro_batch_size, values.get("precision.fp8", "none")
                yield from resume_faults(open_store(uri), model, micro_batch_size=size, fp8=fp8)
            # Adapters alone are saved: their base is read again, as a teacher is.
            fields = _pinned_fields(values)
            for field in fields:
                yield from pin_faults(values.get(field, "none"), open_store(uri), field=field)
            if BASE not in fields:
                return
    # checkpoint that a new run starts from
    if values.get("checkpoint.init_from", "none") != "none":
        model = _section(values, "model", ModelSection)
        checkpoint = _section(values, "checkpoint", CheckpointSection)
        if model and checkpoint:
            if is_resumed:  # its adapters come from its own checkpoint
                checkpoint = checkpoint.model_copy(update={"init_adapter": "none"})
            yield from start_faults(checkpoint, model)


def _teacher_faults(values: Mapping[str, Any]) -> list[Fault]:
    """Return the faults of a live teacher's checkpoint, which each attempt reads, or of stored logits of another one."""
    section, model = (
        _section(values, "distillation", DistillationSection),
        _section(values, "model", ModelSection),
    )
    if section is None or model is None or not section.is_on:
        return []
    if not section.is_live:
        data = _section(values, "data", DataSection)
        return [
            fault
            for path in (data.datasets if data else ())
            for fault in origin_faults(path, stored_how(path), section.teacher_checkpoint)
        ]
    teacher = section.model_of_teacher(model).model_copy(update=dict(UNTRAINED))
    return teacher_faults(section.teacher_checkpoint, teacher)


def _near_faults(near: str, uri: str | None) -> list[Fault]:
    field = "checkpoint.local_uri"
    faults = folder_faults(near, field=field)
    if faults or uri is None:
        return faults
    return apart_faults(near, field=field, other=uri, other_field="checkpoint.uri")


def _section(values: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """Return the job's section, or None where one of its fields did not parse."""
    fields = {field: f"{name}.{field}" for field in kind.model_fields}
    if not values.keys() >= set(fields.values()):
        return None
    return kind.model_validate({field: values[path] for field, path in fields.items()})
