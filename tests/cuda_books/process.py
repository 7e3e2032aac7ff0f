"""A process for each layout, forked from one that has imported everything and not touched the device."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

TIMEOUT_S = 3600
"""Seconds after which a layout counts as hung: one takes seconds, and ten times as long beside others."""
PRELOADED = "tests.cuda_books.rank"
_SERVER = multiprocessing.get_context("forkserver")


def start_server(environment: dict[str, str]) -> None:
    """Set the environment in which the server of forks, and so each layout, will run."""
    os.environ.update(environment)
    _SERVER.set_forkserver_preload([PRELOADED])


def keep_book(layout: str, plant: str, folder: Path, *, module: str = PRELOADED) -> dict[str, Any]:
    """Run one layout, with a planted mistake if ``plant`` names one; return its book, or its error.

    The function ``keep_book`` of ``module`` runs it.
    """
    own = folder / f"{layout} {plant}"
    own.mkdir(parents=True)
    process = _SERVER.Process(target=_keep, args=(layout, plant, own, module))
    process.start()
    process.join(TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
    book = own / "book.json"
    if not book.exists():
        error = f"it ended with {process.exitcode} within {TIMEOUT_S} s"
        return {"layout": layout, "error": error, "races": []}
    return json.loads(book.read_text())


def _keep(layout: str, plant: str, folder: Path, module: str) -> None:
    """Write the book of a layout; the body of its process."""
    from tests.cuda_books.plants import PLANTS

    with (folder / "output.txt").open("w") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
        try:
            if plant:
                PLANTS[plant].make()
            book = importlib.import_module(module).keep_book(layout, folder)
        except Exception as error:  # the process's edge
            text = "".join(traceback.format_exception(error))
            sys.stderr.write(text)
            place = traceback.extract_tb(error.__traceback__)[-1]
            fact = f"{type(error).__name__}: {error} at {Path(place.filename).name}:{place.lineno}"
            book = {"layout": layout, "error": fact, "traceback": text, "races": []}
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    book["cpu_s"] = time.process_time()
    (folder / "book.part").write_text(json.dumps(book))
    (folder / "book.part").rename(folder / "book.json")
    os._exit(0)  # the watchdog and the allocator would wait for a device
