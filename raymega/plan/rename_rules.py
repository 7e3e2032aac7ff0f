"""Rename tensors by rules ``OLD=NEW`` on the leading parts of dotted names.

``layers.*.attention.wq=layers.*.attention.q`` turns ``layers.3.attention.wq.weight`` into
``layers.3.attention.q.weight``. The module knows no tensors and no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raymega.errors import Fault

ANY = "*"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rename:
    """Rule by which names whose dotted parts begin with ``old`` begin with ``new`` instead.

    A ``*`` in ``old`` stands for one part, whatever it is; those in ``new`` take them in order.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]

    def apply(self, name: str) -> str | None:
        """Return the new name, or None when the rule does not apply to this one."""
        parts = name.split(".")
        head, rest = parts[: len(self.old)], parts[len(self.old) :]
        if len(head) < len(self.old):
            return None
        pairs = list(zip(self.old, head, strict=True))
        # ``*`` matches any part, others match themselves
        if any(old not in (ANY, part) for old, part in pairs):
            return None
        met = iter([part for old, part in pairs if old == ANY])
        return ".".join([*(next(met) if part == ANY else part for part in self.new), *rest])

    def inverse(self) -> Rename:
        """Return the rule that undoes this one."""
        return Rename(old=self.new, new=self.old)


def make_renames(rules: Iterable[str]) -> tuple[Rename, ...]:
    """Return the rules of texts that have no :func:`rename_faults`."""
    halves = [rule.partition("=") for rule in rules]
    return tuple(
        Rename(old=tuple(old.split(".")), new=tuple(new.split("."))) for old, _, new in halves
    )


def renamed(name: str, renames: Sequence[Rename]) -> str:
    """Return the name after the first rule that applies to it; the same name when none does."""
    found = (rename.apply(name) for rename in renames)
    return next((other for other in found if other is not None), name)


def rename_faults(field: str, rules: Iterable[str]) -> list[Fault]:
    """Return a fault for each text that is no rule."""
    return [
        Fault(
            fact=f"{field} has {rule!r}",
            rule="a rule is OLD=NEW, the begins of dotted names; * stands for one part, and both "
            "sides have equally many",
            remedy="write for example layers.*.attention.wq=layers.*.attention.q",
        )
        for rule in rules
        if not _is_rule(rule)
    ]


def _is_rule(rule: str) -> bool:
    old, equals, new = rule.partition("=")
    sides = [side.split(".") for side in (old, new)]
    is_named = all(part and part == part.strip() and "=" not in part for s in sides for part in s)
    return bool(equals) and is_named and sides[0].count(ANY) == sides[1].count(ANY)
