"""Facts of a run for MLflow's own fields: params, datasets, source, description, environment.

Pure, except :func:`source_tags`, which asks git and the system. `tracking/mlflow_recorder.py` writes them.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import logging
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import PurePosixPath
from typing import Any

from raymega.config.fields import by_path
from raymega.config.schema import Job
from raymega.drawing.svg import short
from raymega.events import BadStep, RoutingCollapsed, StragglerDetected
from raymega.plan.batch import samples_after
from raymega.plan.tensor_table import model_tensors
from raymega.tracking.expert_load import collapse_warning

log = logging.getLogger(__name__)

EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Kind of an experiment, in MLflow's own word for training.

The pages of MLflow 3.17 do not read it: they open in the mode that the browser kept, at first GenAI, or that the address
names (``?workflowType=machine_learning``). Releases without that switch read the tag.
"""
COMPARED = frozenset(
    {
        "run.steps", "run.seed", "model.family", "model.num_layers", "model.hidden_size",
        "model.num_heads", "model.num_kv_heads", "model.ffn_hidden_size", "model.vocab_size",
        "data.path", "data.seq_len", "data.global_batch_size", "parallel.tp", "parallel.cp",
        "parallel.pp", "parallel.dp", "parallel.ep", "parallel.etp", "parallel.sharding",
        "schedule.name", "schedule.chunks", "schedule.micro_batch_size", "optimizer.name",
        "optimizer.lr", "optimizer.weight_decay", "optimizer.lr_warmup_steps",
        "precision.dtype", "precision.fp8", "memory.recompute",
    }
)  # fmt: skip
"""Fields that every run has as params, so that runs compare; others only where they are not the default."""
NOT_COMPARED = ("run.name", "tracking.", "checkpoint.uri", "checkpoint.local_uri")
"""Beginnings of fields that tell runs apart and explain nothing."""
FIXED_FIELDS = ("model.", "data.", "optimizer.", "precision.", "run.seed")
"""Beginnings of fields that a run keeps for life."""
PACKAGES = ("raymega", "torch", "ray", "mlflow", "numpy", "pyarrow")
GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedDataset:
    """A dataset as MLflow lists it, ``digest`` of at most 36 characters."""

    name: str
    digest: str
    source: str
    context: str


def params_of(job: Mapping[str, object]) -> dict[str, object]:
    """Return the params of a job: what runs are compared by, and what is not the default.

    A job that this version cannot read has all its fields as params.
    """
    fields = by_path(job)
    parsed = _parsed(job)
    kept: Mapping[str, object] = fields
    if parsed is not None:
        changed = by_path(parsed.model_dump(mode="json", exclude_defaults=True))
        kept = {name: fields[name] for name in fields if name in COMPARED or name in changed}
    found = {name: value for name, value in kept.items() if not name.startswith(NOT_COMPARED)}
    if parsed is not None:
        found["model.num_parameters"] = num_parameters(parsed)
    return found


def num_parameters(job: Job) -> int:
    """Return the number of elements that the job's model trains."""
    return sum(tensor.num_parameters for tensor in model_tensors(job.model))


def describe(job: Mapping[str, object]) -> str:
    """Return the run's description, one line; empty for a job that this version cannot read."""
    parsed = _parsed(job)
    if parsed is None:
        return ""
    data = parsed.data
    experts = (
        "" if parsed.model.moe.num_experts == 0 else f", {parsed.model.moe.num_experts} experts"
    )
    tokens = samples_after(parsed.run.steps, data) * data.seq_len
    return (
        f"{parsed.model.family} with {short(num_parameters(parsed))} parameters{experts}, "
        f"{parsed.run.steps:,} steps of {short(data.global_batch_size * data.seq_len)} tokens "
        f"({short(tokens)}), {parsed.precision.dtype}"
    )


def datasets_of(job: Mapping[str, object]) -> Iterator[UsedDataset]:
    """Yield the run's datasets; the digest is of what the job says of its data."""
    fields = by_path(job)

    def listed(field: str) -> list[Mapping[str, Any]]:
        found = fields.get(field)
        return [*found] if isinstance(found, list | tuple) else []

    # blends list their sources, another job has one path
    blends = [listed("data.sources") or [{"path": fields.get("data.path", "")}]]
    blends += [each.get("sources", []) for each in listed("data.stages")]
    training = dict.fromkeys(str(each.get("path", "")) for blend in blends for each in blend)
    validation = [str(each.get("path", "")) for each in listed("data.validation")]
    sources = [(path, "training") for path in training if path]
    sources += [(path, "validation") for path in validation]
    # the digest changes with anything that changes the samples
    said = {name: value for name, value in fields.items() if name.startswith("data.")}
    for path, context in sources:
        text = json.dumps([path, said], sort_keys=True, default=str)
        yield UsedDataset(
            name=PurePosixPath(path.rstrip("/")).name or path,
            digest=hashlib.sha256(text.encode()).hexdigest()[:8],
            source=path,
            context=context,
        )


def source_tags() -> dict[str, str]:
    """Return who runs which commit of the code in the working folder; what is unknown is left out."""
    found = {"mlflow.source.git.commit": _git("rev-parse", "HEAD")}
    try:
        found["mlflow.user"] = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        found["mlflow.user"] = ""
    return {name: value for name, value in found.items() if value}


def environment() -> dict[str, str]:
    """Return versions of packages, Python and the system."""
    versions = {name: _version(name) for name in PACKAGES}
    return versions | {"python": platform.python_version(), "platform": platform.platform()}


def _parsed(job: Mapping[str, object]) -> Job | None:
    try:
        return Job.model_validate_json(json.dumps(job))
    except ValueError:
        return None


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def changed_fields(now: Mapping[str, object], before: Mapping[str, str]) -> dict[str, object]:
    """Return tags for the fields that differ from the run's params, which MLflow never rewrites."""
    changed = {n: v for n, v in now.items() if n in before and before[n] != str(v)}
    for name, value in changed.items():
        # Layout and length may change with every driver.
        level = logging.WARNING if name.startswith(FIXED_FIELDS) else logging.INFO
        log.log(
            level, "MLflow keeps the param %s=%s; the run now has %s", name, before[name], value
        )
    return {f"changed.{name}": value for name, value in changed.items()}


def sign_tag(event: BadStep | StragglerDetected | RoutingCollapsed) -> dict[str, str]:
    """Return the tag of a warning; later ones of a layer or rank, and of a kind of bad step, replace it."""
    if isinstance(event, RoutingCollapsed):
        return {f"collapse.{event.layer}": collapse_warning(event.layer, event.experts, event.step)}
    if isinstance(event, BadStep):
        told = f"step {event.step}, {event.action}: {event.fact} {event.where}"
        return {f"bad_step.{event.kind}": told.strip()}
    told = f"{event.ratio:.2f} at step {event.step}, node {event.node}"
    return {f"straggler.{event.rank}": told}
