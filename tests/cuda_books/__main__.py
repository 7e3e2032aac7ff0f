"""Keeps the books of all layouts, and holds them to their budgets: ``make cuda-books``.

Each layout is rank 0 of its grid in a process of its own, two at a time. A number that differs from budgets.json, a
race, or a planted mistake that stays green makes the exit code 1; ``--write`` writes the budgets anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.cuda_books.build import build_device
from tests.cuda_books.happens_before import Race, find_races
from tests.cuda_books.layouts import LAYOUTS
from tests.cuda_books.plants import PLANTS, Plant
from tests.cuda_books.trace import read_trace

BUDGETS = Path(__file__).with_name("budgets.json")
BUDGETED = (
    "launches_per_layer",
    "syncs",
    "syncs_in_passes",
    "collectives",
    "mallocs",
    "communicators",
    "communicators_unused",
    "early_receives",
    "build_peak_bytes",
    "state_bytes",
    "state_error_bytes",
    "peak_bytes",
    "pinned_bytes",
    "pinned_in_step_bytes",
    "atomic_sums",
)
"""Counts of one step that must be equal each time; the rest of a book is for reading."""
PEAK_ERROR = 0.02
"""Largest share by which `raymega plan` may miss the allocator's peak."""
PINNED_SLACK_BYTES = 64 * 2**10
"""Bytes by which pinned memory may be more than planned: rows that replicas share unevenly."""
TIMEOUT_S = 600


def keep_book(layout: str, plant: str, environment: dict[str, str], folder: Path) -> dict[str, Any]:
    """Run one layout, with a planted mistake if ``plant`` names one; return its book with the races of its traces."""
    traces = folder / f"{layout} {plant}"
    traces.mkdir()
    command = [sys.executable, "-m", "tests.cuda_books.rank", layout, str(traces), plant]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        return {"layout": layout, "error": done.stderr.strip().splitlines()[-1:], "races": []}
    book = json.loads(done.stdout.splitlines()[-1])
    return {
        **book,
        "races": [
            str(race) for name in ("step", "recorded") for race in _races(traces / f"{name}.tsv")
        ],
    }


def _races(trace: Path) -> list[Race]:
    with trace.open() as lines:
        return find_races(read_trace(lines))


def over_budget(book: dict[str, Any], budget: dict[str, Any]) -> list[str]:
    """Return what differs from the budget, and the first race."""
    if "error" in book:
        return [f"it failed: {book['error']}"]
    found = [
        f"{name} {book[name]}, budget {budget.get(name)}"
        for name in BUDGETED
        if book[name] != budget.get(name)
    ]
    planned = book["planned_peak_bytes"]
    if abs(planned / book["peak_bytes"] - 1) > PEAK_ERROR:
        found.append(
            f"peak_bytes {book['peak_bytes']}, planned {planned}: more than {PEAK_ERROR:.0%} off"
        )
    if book["pinned_bytes"] > book["planned_pinned_bytes"] + PINNED_SLACK_BYTES:
        found.append(f"pinned_bytes {book['pinned_bytes']}, planned {book['planned_pinned_bytes']}")
    return [*found, *(f"{len(book['races'])} races, first: {race}" for race in book["races"][:1])]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_books")
    parser.add_argument(
        "--build", type=Path, default=Path("build/cuda-books"), help="folder of the libraries"
    )
    parser.add_argument("--write", action="store_true", help="write budgets.json anew")
    parser.add_argument("--layout", action="append", help="only this layout; may be repeated")
    options = parser.parse_args()
    version = metadata.version("torch")
    if version.endswith("+cpu"):
        parser.error(
            f"torch {version} has no CUDA path; install torch's CUDA build here, as `make cuda-books` does"
        )
    environment = build_device(options.build.absolute())
    budgets = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    layouts = options.layout or list(LAYOUTS)
    plants = {} if options.layout else PLANTS

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        books = list(pool.map(lambda layout: keep_book(layout, "", environment, folder), layouts))
        planted = list(
            pool.map(
                lambda item: keep_book(item[1].layout, item[0], environment, folder), plants.items()
            )
        )

    if options.write:
        kept = {
            book["layout"]: {key: book[key] for key in BUDGETED}
            for book in books
            if "error" not in book
        }
        BUDGETS.write_text(json.dumps(budgets | kept, indent=1) + "\n")
        budgets |= kept
    faults = {book["layout"]: over_budget(book, budgets.get(book["layout"], {})) for book in books}
    red = {
        name: is_red(plant, book, budgets)
        for (name, plant), book in zip(plants.items(), planted, strict=True)
    }
    report(books, faults, red)
    return int(any(faults.values()) or not all(red.values()))


def is_red(plant: Plant, book: dict[str, Any], budgets: dict[str, Any]) -> bool:
    """Return whether a planted mistake shows where it must: as a race, or in one count of the budget."""
    if "error" in book:
        return False
    if plant.shows_in == "races":
        return bool(book["races"])
    return bool(book[plant.shows_in] != budgets[plant.layout][plant.shows_in])


def report(books: list[dict[str, Any]], faults: dict[str, list[str]], red: dict[str, bool]) -> None:
    """Print a row a layout, what is over budget, the plants, and one line of JSON."""
    print(
        f"{'layout':26}{'launches':>9}{'a layer':>9}{'syncs':>7}{'NCCL':>6}{'comms':>6}{'peak GiB':>10}{'plan':>8}"
    )
    whole = [book for book in books if "error" not in book]
    for book in whole:
        peak, planned = book["peak_bytes"], book["planned_peak_bytes"]
        print(
            f"{book['layout']:26}{book['launches']:9}{book['launches_per_layer']:9.1f}{book['syncs']:7}"
            f"{book['collectives']:6}{book['communicators']:6}{peak / 2**30:10.2f}{100 * (planned / peak - 1):+7.1f}%"
        )
    for layout, found in faults.items():
        for fault in found:
            print(f"{layout}: {fault}")
    for name, is_caught in red.items():
        print(f"planted: {name}: {'red' if is_caught else 'NOT SEEN'}")
    errors = [abs(book["planned_peak_bytes"] / book["peak_bytes"] - 1) for book in whole]
    summary = {
        "layouts": len(whole),
        "races": sum(len(book["races"]) for book in whole),
        "launches_per_layer": {book["layout"]: book["launches_per_layer"] for book in whole},
        "syncs_per_step": {book["layout"]: book["syncs"] for book in whole},
        "peak_error": round(max(errors, default=0.0), 4),
        "plants_red": sum(red.values()),
        "plants": len(red),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    sys.exit(main())
