"""What a run takes of the checkpoint that it starts from, by the job's own rules.

Names alone; whether a checkpoint has such tensors is checkpoint.start's to see.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from raymega.config.schema import CheckpointSection
from raymega.plan.rename_rules import make_renames, renamed

RENAME, REINIT, IGNORE, CHANGED, UPCYCLE = (
    f"checkpoint.{name}"
    for name in ("init_rename", "reinit", "init_ignore", "allow_changed", "init_upcycle")
)
LAST_STEP = ("*.moe.router.counts",)
"""What a run keeps of its own last step: no weight, and of no use to another run."""


def init_names(section: CheckpointSection, saved: Iterable[str]) -> dict[str, str]:
    """A checkpoint's tensors that are of use, each with its name in the run's model."""
    renames = make_renames(section.init_rename)
    left = (*section.init_ignore, *LAST_STEP)
    return {name: renamed(name, renames) for name in saved if not matches(name, left)}


def is_reinitialised(section: CheckpointSection, tensor: str) -> bool:
    """Whether a tensor of the run's model keeps its first values."""
    return matches(tensor, (*section.reinit, *LAST_STEP))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern such as ``layers.1?.*`` fits the whole name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
