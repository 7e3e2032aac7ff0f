"""Prints the roofline of each case as a table, and holds it to its budget.

A figure that differs from budgets.json makes the exit code 1; ``--write`` writes the budgets anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.cuda_books.build import build_device
from tests.cuda_books.process import keep_book, start_server
from tests.cuda_books.roofline.jobs import CASES

BUDGETS = Path(__file__).with_name("budgets.json")
MODULE = "tests.cuda_books.roofline.cases"
Figures = Mapping[str, float]


def main() -> int:
    """Run the command."""
    options = _options()
    start_server(build_device(options.build.absolute()))
    names = options.case or list(CASES)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        books = list(pool.map(lambda name: _keep(name, options.keep or Path(folder)), names))
    errors = [book for book in books if "error" in book]
    for book in errors:
        print(f"{book['layout']}: it failed: {book['error']}")
    # figures of the cases that ran, and their budgets
    figures = {book["layout"]: book["figures"] for book in books if "error" not in book}
    print(table(figures))
    budgets = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    if options.write:
        budgets |= figures
        BUDGETS.write_text(json.dumps(budgets, indent=1) + "\n")
    faults = [
        fault for name in figures for fault in changes(name, figures[name], budgets.get(name, {}))
    ]
    print(*faults, json.dumps(figures), sep="\n")
    return int(bool(errors or faults))


def _keep(name: str, folder: Path) -> dict[str, Any]:
    return keep_book(name, "", folder, module=MODULE)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_books.roofline")
    parser.add_argument(
        "--build", type=Path, default=Path("build/cuda-books"), help="folder of the libraries"
    )
    parser.add_argument("--write", action="store_true", help="write budgets.json anew")
    parser.add_argument("--case", action="append", help="only this case; may be repeated")
    parser.add_argument(
        "--keep", type=Path, help="an empty folder for traces and output, which stays"
    )
    return parser.parse_args()


def table(figures: Mapping[str, Figures]) -> str:
    """Return a row a figure, a column a case."""
    rows = dict.fromkeys(row for each in figures.values() for row in each)
    lines = [f"{'':28}" + "".join(f"{name:>28}" for name in figures)]
    lines += [
        f"{row:28}" + "".join(f"{each.get(row, 0.0):28,.2f}" for each in figures.values())
        for row in rows
    ]
    return "\n".join(lines)


def changes(name: str, figures: Figures, budget: Figures) -> list[str]:
    """Return what differs from the budget."""
    return [
        f"{name}: {figure} {figures.get(figure, 'is gone')}, budget {budget.get(figure, 'none')}"
        for figure in sorted({*figures, *budget})
        if figures.get(figure) != budget.get(figure)
    ]


if __name__ == "__main__":
    sys.exit(main())
