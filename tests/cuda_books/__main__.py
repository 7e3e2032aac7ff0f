"""Keeps the books of all layouts, and holds them to their budgets: ``make cuda-books``.

Each layout is a rank in a process of its own, two at a time. A figure that differs from budgets.json, a race, or a
planted mistake that stays green makes the exit code 1; ``--write`` writes the budgets anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.cuda_books.budgets import (
    figures_of,
    over_budget,
    peak_error,
    read_budgets,
    write_budgets,
)
from tests.cuda_books.build import build_device
from tests.cuda_books.layouts import LAYOUTS
from tests.cuda_books.plants import PLANTS, Plant
from tests.cuda_books.process import keep_book, start_server

Book = dict[str, Any]


def main() -> int:
    """Run the command."""
    options = _options()
    start_server(build_device(options.build.absolute()))
    # what is asked for: --layout alone leaves the plants out, --plant alone the layouts
    layouts = options.layout or ([] if options.plant else list(LAYOUTS))
    names = options.plant or ([] if options.layout else list(PLANTS))
    passed = Passed(options.resume)
    layouts = [name for name in layouts if name not in passed]
    plants = {name: PLANTS[name] for name in names if name not in passed}
    # ranks, each in a process of its own
    with tempfile.TemporaryDirectory() as name:
        books, planted = _keep_books(layouts, plants, options.keep or Path(name))
    if options.write:
        write_budgets(books)
    # verdicts: layouts against their budgets, plants against what they must change
    budgets = read_budgets()
    faults = {book["layout"]: over_budget(book, budgets.get(book["layout"], {})) for book in books}
    red = {name: is_red(plants[name], book, budgets) for name, book in planted.items()}
    passed.add(name for name, found in faults.items() if not found)
    passed.add(name for name, is_caught in red.items() if is_caught)
    report(books, faults, red)
    return int(any(faults.values()) or not all(red.values()))


class Passed:
    """Layouts and planted mistakes that have passed, in the file that `make test-all` keeps for a set of sources."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        is_there = file is not None and file.exists()
        self._names = set(file.read_text().splitlines()) if file and is_there else set[str]()

    def __contains__(self, name: str) -> bool:
        """Return whether it has passed."""
        return f"cuda-books: {name}" in self._names

    def add(self, names: Iterable[str]) -> None:
        """Write down what has passed."""
        if self._file is None:
            return
        self._file.parent.mkdir(exist_ok=True)
        with self._file.open("a") as file:
            file.writelines(f"cuda-books: {name}\n" for name in names)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_books")
    parser.add_argument(
        "--build", type=Path, default=Path("build/cuda-books"), help="folder of the libraries"
    )
    parser.add_argument("--write", action="store_true", help="write budgets.json anew")
    parser.add_argument("--layout", action="append", help="only this layout; may be repeated")
    parser.add_argument(
        "--plant", action="append", help="only this planted mistake; may be repeated"
    )
    parser.add_argument(
        "--resume", type=Path, help="file that lists what has passed, and is left out"
    )
    parser.add_argument(
        "--keep", type=Path, help="an empty folder for traces and output, which stays"
    )
    version = metadata.version("torch")
    if version.endswith("+cpu"):
        parser.error(
            f"torch {version} has no CUDA path; install torch's CUDA build here, as `make cuda-books` does"
        )
    return parser.parse_args()


def _keep_books(
    layouts: Iterable[str], plants: dict[str, Plant], folder: Path
) -> tuple[list[Book], dict[str, Book]]:
    """Run layouts and planted mistakes, two at a time, with a line for each that is over."""
    # pairs of a layout and a planted mistake, which is empty for a plain book
    work = [(name, "") for name in layouts] + [
        (plant.layout, name) for name, plant in plants.items()
    ]
    num_over = 0

    def keep(item: tuple[str, str]) -> Book:
        nonlocal num_over
        began = time.monotonic()
        book = keep_book(*item, folder)
        num_over += 1
        text = ", planted: ".join(filter(None, item))
        seconds = time.monotonic() - began
        used = f"{seconds:5.1f} s, {book.get('cpu_s', 0.0):4.1f} s of a core"
        print(f"{num_over:3}/{len(work)}  {used}  {text}", file=sys.stderr, flush=True)
        return book

    with ThreadPoolExecutor(2) as pool:
        books = list(pool.map(keep, work))
    return books[: len(books) - len(plants)], dict(
        zip(plants, books[len(books) - len(plants) :], strict=True)
    )


def is_red(plant: Plant, book: Book, budgets: dict[str, dict[str, float]]) -> bool:
    """Return whether a planted mistake shows where it must: as a race, or in one figure of the budget."""
    if "error" in book:
        return False
    if plant.shows_in == "races":
        return bool(book["races"])
    return figures_of(book)[plant.shows_in] > budgets[plant.layout][plant.shows_in]


def report(books: list[Book], faults: dict[str, list[str]], red: dict[str, bool]) -> None:
    """Print a row a layout, what is over budget, the plants, and one line of JSON."""
    print(
        f"{'layout':32}{'launches':>9}{'a layer':>9}{'syncs':>7}{'NCCL GiB':>9}{'comms':>6}{'unused':>7}"
        f"{'build GiB':>10}{'peak GiB':>9}{'plan':>8}"
    )
    # one row a layout that ran to its end
    whole = [book for book in books if "error" not in book]
    for book in whole:
        figures = book["figures"]
        sent = sum(
            v for name, v in figures.items() if name.startswith("step.") and name.endswith("_bytes")
        )
        print(
            f"{book['layout']:32}{figures['step.launches']:9}{book['launches_per_layer']:9.1f}{figures['step.syncs']:7}"
            f"{sent / 2**30:9.2f}{figures['communicators']:6}{figures['communicators_unused']:7}"
            f"{figures['build_peak_bytes'] / 2**30:10.2f}{figures['peak_bytes'] / 2**30:9.2f}{100 * peak_error(book):+7.1f}%"
        )
    for layout, found in faults.items():
        for fault in found:
            print(f"{layout}: {fault}")
    for name, is_caught in red.items():
        print(f"planted: {name}: {'red' if is_caught else 'NOT SEEN'}")
    # the last line, for programs that read it
    errors = [abs(peak_error(book)) for book in whole]
    summary = {
        "layouts": len(whole),
        "races": sum(len(book["races"]) for book in whole),
        "launches_per_layer": {book["layout"]: book["launches_per_layer"] for book in whole},
        "syncs_per_step": {book["layout"]: book["figures"]["step.syncs"] for book in whole},
        "peak_error": round(max(errors, default=0.0), 4),
        "plants_red": sum(red.values()),
        "plants": len(red),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    sys.exit(main())
