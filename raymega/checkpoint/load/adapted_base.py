"""Base of a checkpoint of adapters: the weights that they were trained on, under the names of their run's model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.load.fingerprint import overwritten_faults
from raymega.checkpoint.load.init_from import WEIGHTS, starting_manifest, upcycling_of
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.schema import CheckpointSection, ModelSection
from raymega.errors import ConfigError, Fault, RaymegaError, raise_faults
from raymega.plan.tensor_table import model_tensors
from raymega.plan.upcycling import Upcycling

FIELD = "checkpoint.init_from"
BASE_REMEDY = f"name its copy: --set {FIELD}=URI"
"""Remedy where the base of adapters that are used has moved."""
START_FIELDS = ("init_from", "init_rename", "reinit", "init_ignore", "init_upcycle")
"""Fields of a run's checkpoint section that say which weights its base has, and under which names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedBase:
    """Weights under adapters.

    Attributes:
        checkpoint: Checkpoint with these weights, by the names of the adapters' model.
        upcycling: Experts that are copies of dense layers there, to be scaled after a load.
    """

    checkpoint: Checkpoint
    upcycling: Upcycling


def start_of(manifest: Manifest) -> dict[str, Any]:
    """Return the fields of the run of ``manifest`` that say which weights it started from."""
    told = manifest.job.get("checkpoint")
    return (
        {name: told[name] for name in START_FIELDS if name in told}
        if isinstance(told, dict)
        else {}
    )


def open_base(
    adapters: Checkpoint, model: ModelSection, *, start: Mapping[str, Any], remedy: str
) -> AdaptedBase:
    """Open the base of a checkpoint of adapters, and check that it has all that they lack.

    Args:
        adapters: Checkpoint of the adapters.
        model: Model with them.
        start: Fields of the base's place and names, as of :func:`start_of`.
        remedy: Remedy where the base is missing, or another one.

    Raises:
        ConfigError: The base is missing, of another model, or holds other weights than the adapters were trained on.
    """
    section = CheckpointSection.model_validate_json(json.dumps(dict(start)))
    source = f"{adapters.store.uri}/{adapters.manifest.key}"
    if section.init_from == "none":
        raise ConfigError(
            fact=f"{source} holds adapters, and its run had {FIELD}=none",
            rule="adapters are used with the weights that they were trained on",
            remedy=remedy,
        )
    try:
        store, manifest = open_checkpoint(section.init_from)
    except RaymegaError as error:
        faults = [
            Fault(fact=f"the base of {source}: {each.fact}", rule=each.rule, remedy=remedy)
            for each in error.faults
        ]
        raise_faults(ConfigError, faults)
        raise
    told = overwritten_faults(adapters.manifest, section.init_from, field=FIELD, remedy=remedy)
    raise_faults(ConfigError, [*told])
    renamed = starting_manifest(manifest, section, model)
    begin = f"{WEIGHTS}/"
    held = {
        box.tensor.removeprefix(begin): box.global_shape
        for box in (*renamed.boxes, *adapters.manifest.boxes)
        if box.tensor.startswith(begin)
    }
    for tensor in model_tensors(model):
        if held.get(tensor.name) != tensor.shape:
            raise ConfigError(
                fact=f"{section.init_from} has no {tensor.name} of shape {tensor.shape}",
                rule="the base has every weight of the model that the adapters change",
                remedy=remedy,
            )
    return AdaptedBase(
        checkpoint=Checkpoint(store, renamed), upcycling=upcycling_of(manifest, section, model)
    )
