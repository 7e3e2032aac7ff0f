"""What a run takes of the checkpoint that it starts from, by the job's own rules.

Names alone; whether a checkpoint has such tensors is checkpoint.start's to see.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from raymega.config.schema import CheckpointSection
from raymega.errors import Fault
from raymega.plan.rename_rules import make_renames, rename_faults, renamed

RENAME, REINIT, IGNORE, CHANGED, UPCYCLE = (
    f"checkpoint.{name}"
    for name in ("init_rename", "reinit", "init_ignore", "allow_changed", "init_upcycle")
)
READS = ("checkpoint.init_from", UPCYCLE, RENAME, REINIT, IGNORE, CHANGED)
"""Fields that :func:`init_from_faults` reads, in its order."""
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


def init_from_faults(
    init_from: str,
    is_upcycled: bool,  # noqa: FBT001
    *rules: tuple[str, ...],
) -> list[Fault]:
    """Rules that are none, or that nothing is there to apply to; in the order of the fields above."""
    given = dict(zip((RENAME, REINIT, IGNORE, CHANGED), rules, strict=True))
    faults = rename_faults(RENAME, given[RENAME])
    if is_upcycled:
        given[UPCYCLE] = ("true",)
    if init_from != "none":
        return faults
    return faults + [
        Fault(
            fact=f"{field} has {', '.join(rules)}, and checkpoint.init_from is none",
            rule="it says what of another checkpoint the run starts with",
            remedy=f"set checkpoint.init_from, or leave {field} out",
        )
        for field, rules in given.items()
        if rules
    ]
