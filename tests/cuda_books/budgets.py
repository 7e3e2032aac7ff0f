"""Budgets: figures of each layout that must be equal each time, in a file with one line a figure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.cuda_books.layouts import LAYOUTS, OFF_PLAN

BUDGETS = Path(__file__).with_name("budgets.json")
Figures = dict[str, float]
PEAK_ERROR = 0.02
"""Largest share by which `raymega plan` may miss the peak of what torch's allocator is asked for."""
PINNED_SLACK_BYTES = 3 * 32 * 2**10
"""Bytes by which pinned memory may be more than planned: rows that replicas share unevenly, in up to 3 copies."""

READING = ("evaluation", "scores", "generation")
"""Phases without a backward."""


def read_budgets() -> dict[str, Figures]:
    """Return the figures of each layout."""
    return json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}


def write_budgets(books: Iterable[Mapping[str, Any]]) -> None:
    """Write the figures of ``books`` anew, and leave out layouts that no longer exist; others stay as they are."""
    new = {book["layout"]: figures_of(book) for book in books if "error" not in book}
    # in the order of LAYOUTS, so that a diff shows figures and no moves
    known = read_budgets() | new
    kept = {name: known[name] for name in LAYOUTS if name in known}
    BUDGETS.write_text(json.dumps(kept, indent=1) + "\n")


def figures_of(book: Mapping[str, Any]) -> Figures:
    """Return what is budgeted of a book, by name."""
    figures, off = dict(book["figures"]), OFF_PLAN.get(book["layout"], ())
    if "pinned" in off:
        figures["pinned_error_bytes"] = book["planned_pinned_bytes"] - figures["pinned_bytes"]
    return {
        "launches_per_layer": book["launches_per_layer"],
        **{name: figures[name] for name in sorted(figures)},
    }


def peak_error(book: Mapping[str, Any]) -> float:
    """Return the share by which the planned peak is above the allocator's."""
    return book["planned_peak_bytes"] / book["figures"]["peak_bytes"] - 1


def off_plan(book: Mapping[str, Any]) -> dict[str, int]:
    """Return in what the plan misses a layout, each with planned less counted bytes."""
    figures = book["figures"]
    errors = {
        "peak": book["planned_peak_bytes"] - figures["peak_bytes"],
        "state": -figures["state_error_bytes"],
        "pinned": book["planned_pinned_bytes"] - figures["pinned_bytes"],
    }
    allowed = {"peak": PEAK_ERROR * figures["peak_bytes"], "state": 0, "pinned": PINNED_SLACK_BYTES}
    missed = {kind: error for kind, error in errors.items() if abs(error) > allowed[kind]}
    # passes without a backward may take less than a step, and not more than is planned
    planned = book["planned_peak_bytes"]
    peaks = {phase: figures.get(f"{phase}.peak_bytes", 0) for phase in READING}
    return missed | {
        f"peak of {phase}": planned - peak
        for phase, peak in peaks.items()
        if peak > (1 + PEAK_ERROR) * planned
    }


def over_budget(book: Mapping[str, Any], budget: Mapping[str, float]) -> list[str]:
    """Return what differs from the budget or the plan, the number of races, and the first of them."""
    if "error" in book:
        return [f"it failed: {book['error']}"]
    # figures, equal to the digit: more and less are both told
    figures = figures_of(book)
    found = [
        f"{name} {figures.get(name, 'is gone')}, budget {budget.get(name, 'none')}"
        for name in sorted({*figures, *budget})
        if figures.get(name) != budget.get(name)
    ]
    # the plan, within its limits; a layout that is right again must leave OFF_PLAN
    off, known = off_plan(book), OFF_PLAN.get(book["layout"], frozenset[str]())
    found += [
        f"planned {kind} {off[kind]:+} bytes off, not in OFF_PLAN" for kind in off.keys() - known
    ]
    found += [f"planned {kind} is right, but in OFF_PLAN" for kind in sorted(known - off.keys())]
    return [*found, *(f"{len(book['races'])} races, first: {race}" for race in book["races"][:1])]
