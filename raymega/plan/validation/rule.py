"""Define a rule between the values of a job: a function, and the fields that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raymega.errors import Fault

FaultRow = tuple[bool, str, str, str]
"""Row of a rule: true where the rule is broken, then fact, rule and remedy of its fault."""
Check = Callable[..., Iterator[Fault]]
MAX_LISTED = 100_000
"""Most layers of a model, blocks of its tower and stages of a pipeline: above any real job, and quick to enumerate."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A check, and the dotted paths of the fields whose values it gets, in order."""

    reads: tuple[str, ...]
    check: Check

    def __call__(self, *values: Any, **named: Any) -> list[Fault]:
        """Return the faults of the values."""
        return list(self.check(*values, **named))

    def faults_of(self, values: Mapping[str, Any]) -> list[Fault]:
        """Return the faults of a job's ``values`` by dotted path; none where a field of the rule is missing."""
        try:
            given = [values[path] for path in self.reads]
        except KeyError:
            return []
        return list(self.check(*given))


def reads(sections: str) -> Callable[[Check], Rule]:
    """Return a decorator that makes a generator of faults a rule; ``registry.py`` must list the rule.

    Args:
        sections: Fields that the function gets as arguments, by section: ``parallel.tp cp, model.num_heads``.
    """
    parts = (part.split(".") for part in sections.split(", "))
    paths = tuple(f"{section}.{name}" for section, names in parts for name in names.split())
    return lambda check: Rule(paths, check)


def broken_rows(rows: Iterable[FaultRow]) -> list[Fault]:
    """Return the faults of the broken rows of a table of independent rules."""
    return [
        Fault(fact=fact, rule=rule, remedy=remedy)
        for is_broken, fact, rule, remedy in rows
        if is_broken
    ]


def divisors(number: int, *, least: int = 1) -> str:
    """Return the divisors of ``number``, up to 1,024, as text for a remedy."""
    return ", ".join(str(d) for d in range(least, min(number, 1024) + 1) if number % d == 0)
