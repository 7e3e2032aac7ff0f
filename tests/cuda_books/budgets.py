"""Budgets: figures of each layout that must be equal each time, in a file with one line a figure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.cuda_books.layouts import LAYOUTS

BUDGETS = Path(__file__).with_name("budgets.json")
Figures = dict[str, float]


def read_budgets() -> dict[str, Figures]:
    """Return the figures of each layout."""
    return json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}


def write_budgets(books: Iterable[Mapping[str, Any]]) -> None:
    """Write the figures of ``books`` anew, and leave out layouts that no longer exist; others stay as they are."""
    new = {book["layout"]: figures_of(book) for book in books if "error" not in book}
    known = read_budgets() | new
    kept = {name: known[name] for name in LAYOUTS if name in known}
    BUDGETS.write_text(json.dumps(kept, indent=1) + "\n")


def figures_of(book: Mapping[str, Any]) -> Figures:
    """Return what is budgeted of a book, by name."""
    return {
        "launches_per_layer": book["launches_per_layer"],
        **{name: book["figures"][name] for name in sorted(book["figures"])},
    }


def over_budget(book: Mapping[str, Any], budget: Mapping[str, float]) -> list[str]:
    """Return what differs from the budget, the number of races, and the first of them."""
    if "error" in book:
        return [f"it failed: {book['error']}"]
    figures = figures_of(book)
    found = [
        f"{name} {figures.get(name, 'is gone')}, budget {budget.get(name, 'none')}"
        for name in sorted({*figures, *budget})
        if figures.get(name) != budget.get(name)
    ]
    return [*found, *(f"{len(book['races'])} races, first: {race}" for race in book["races"][:1])]
