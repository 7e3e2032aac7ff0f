"""Apply the job's rules on what a run takes from the checkpoint that it starts from.

The module handles names and fields alone; ``raymega.checkpoint.load.init_from`` checks that a checkpoint has
such tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from raymega.config.schema import CheckpointSection
from raymega.plan.rename_rules import make_renames, renamed

RENAME, REINIT, IGNORE, CHANGED, UPCYCLE = (
    f"checkpoint.{name}"
    for name in ("init_rename", "reinit", "init_ignore", "allow_changed", "init_upcycle")
)
LAST_STEP = ("*.moe.router.counts",)
"""Patterns of tensors with state of a run's own last step: no weights, and useless to another run.
"""
REPEATED = {"attention.layer_types": "", "layer_sizes.num_heads": "num_heads"}
"""Fields that list a value a layer, repeated to the last one, with the field that an empty list stands for."""


def init_names(section: CheckpointSection, saved: Iterable[str]) -> dict[str, str]:
    """Return the tensors of a checkpoint that are used, each with its name in the run's model."""
    renames = make_renames(section.init_rename)
    # ignored names are the checkpoint's own, before renaming
    left = (*section.init_ignore, *LAST_STEP)
    return {name: renamed(name, renames) for name in saved if not matches(name, left)}


def is_reinitialised(section: CheckpointSection, tensor: str) -> bool:
    """Return whether a tensor of the run's model keeps its initial values."""
    return matches(tensor, (*section.reinit, *LAST_STEP))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern such as ``layers.1?.*`` fits the whole name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_same_by_layer(field: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two unlike lists give each layer that both models have the same value."""
    if field not in REPEATED:
        return False
    other = REPEATED[field]
    blocks = min(made["num_layers"] + made["num_nextn_predict_layers"] for made in (then, now))
    lists = [made[field] or [made[other]] for made in (then, now)]
    return all(lists[0][n % len(lists[0])] == lists[1][n % len(lists[1])] for n in range(blocks))
