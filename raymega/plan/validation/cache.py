"""Cache the results of a job's rules for a search over jobs that differ in a few fields.

``raymega.plan.validation.registry`` lists the rules.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from raymega.config.schema import Job
from raymega.plan.validation.registry import RULES
from raymega.plan.validation.rule import Rule


class RuleMemo:
    """Results of rules for jobs that differ only in the fields ``varied``, by the values that they read.

    The jobs must not set fields without effect: :func:`raymega.plan.validation.unused_fields.settled`.
    """

    def __init__(self, varied: Collection[str]) -> None:
        """Sort the rules by whether they read one of ``varied``, dotted paths of fields."""
        self._paths = [tuple(path.split(".")) for path in varied]
        places = {path: place for place, path in enumerate(varied)}
        reads = [(rule, [places[path] for path in rule.reads if path in places]) for rule in RULES]
        # rules that read a varied field, with their results by its value; the others are checked once
        self._varying: list[tuple[Rule, list[int], dict[tuple[Any, ...], bool]]] = [
            (rule, at, {}) for rule, at in reads if at
        ]
        self._constant = [rule for rule, at in reads if not at]
        self._are_constant_kept: bool | None = None

    def is_legal(self, job: Job) -> bool:
        """Return whether the job breaks no rule."""
        if self._are_constant_kept is None:
            self._are_constant_kept = all(_keeps(job, rule) for rule in self._constant)
        if not self._are_constant_kept:
            return False
        values = [getattr(getattr(job, section), field) for section, field in self._paths]
        for rule, at, known in self._varying:
            key = tuple([values[place] for place in at])
            if key not in known:
                known[key] = _keeps(job, rule)
            if not known[key]:
                return False
        return True


def _keeps(job: Job, rule: Rule) -> bool:
    places = [path.split(".") for path in rule.reads]
    return not rule(*(getattr(getattr(job, section), field) for section, field in places))
