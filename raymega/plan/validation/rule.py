"""How a rule between the values of a job is written: one function, and the fields that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from raymega.errors import Fault

FaultRow = tuple[bool, str, str, str]
"""Whether it is broken; then fact, rule and remedy."""
Check = Callable[..., Iterator[Fault]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A check, and the dotted paths of the fields whose values it gets, in order."""

    reads: tuple[str, ...]
    check: Check

    def __call__(self, *values: Any, **named: Any) -> list[Fault]:
        """What is wrong with the values."""
        return list(self.check(*values, **named))


def reads(*paths: str) -> Callable[[Check], Rule]:
    """Make a generator of faults a rule. It takes effect once plan.validation.registry lists it.

    Args:
        paths: Dotted paths of fields, such as ``parallel.cp``: the function's arguments.
    """
    return lambda check: Rule(paths, check)


def fields(section: str, names: str) -> tuple[str, ...]:
    """Dotted paths of several fields of a section, whose ``names`` are one text with blanks."""
    return tuple(f"{section}.{name}" for name in names.split())


def broken_rows(rows: Iterable[FaultRow]) -> list[Fault]:
    """The faults of a table whose rows are each by themselves."""
    return [
        Fault(fact=fact, rule=rule, remedy=remedy)
        for is_broken, fact, rule, remedy in rows
        if is_broken
    ]


def divisors(number: int, *, least: int = 1) -> str:
    """The divisors of ``number`` as a remedy lists them, up to 1,024."""
    return ", ".join(str(d) for d in range(least, min(number, 1024) + 1) if number % d == 0)
