"""What is told of mistakes, all cases in one scratch folder; and which places of the package they reach."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tests.golden import calls, commands, faults
from tests.golden.scenery import furnish
from tests.golden.scratch import scratch
from tests.golden.sites import Position, reached_sites


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusals:
    """All that was told.

    Attributes:
        texts: By file.
        reached: Places at which faults were made.
        wrong: Commands that did not end with the code that their case states, and cases of which
            nothing was told.
    """

    texts: dict[str, str]
    reached: frozenset[Position]
    wrong: tuple[str, ...]


def file_names() -> list[str]:
    """One file a group of cases."""
    return [
        *(f"faults/{group}.txt" for group in (*faults.groups(), faults.FIELDS)),
        *(f"commands/{group}.txt" for group in commands.groups()),
        "faults/calls.txt",
    ]


@cache
def refused() -> Refusals:
    """Every case once."""
    texts: dict[str, str] = {}
    wrong: list[str] = []
    with scratch() as folder, reached_sites() as reached:
        furnish(folder)
        for group, cases in commands.groups().items():
            texts[f"commands/{group}.txt"], ends = commands.told_of_cases(folder, cases)
            wrong += ends
        for group, cases in faults.groups().items():
            texts[f"faults/{group}.txt"] = faults.told_of_cases(folder, cases)
        texts[f"faults/{faults.FIELDS}.txt"] = faults.told_of_fields()
        texts["faults/calls.txt"] = calls.told_of_calls(folder)
    accepted = [
        f"{name}: a case without a fault"
        for name, text in texts.items()
        if faults.NO_FAULT in text.splitlines()
    ]
    return Refusals(texts=texts, reached=frozenset(reached), wrong=(*wrong, *accepted))
