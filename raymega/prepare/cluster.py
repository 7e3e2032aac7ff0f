"""Runs a function on many items as Ray Data tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ray.data


def on_cluster(items: Sequence[Any], run: Callable[[Any], Any]) -> Iterator[Any]:
    """Run ``run`` on each item as a Ray Data task of one CPU, and yield its results as they come."""
    if not items:
        return
    # Ray Data's own progress bars and log lines would break into the command's.
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    # One block an item, so that each is a task of its own. Rows are dicts with one value.
    rows = ray.data.from_items(list(items), override_num_blocks=len(items))
    for row in rows.map(partial(_run_row, run=run), num_cpus=1).iter_rows():
        yield row["item"]


def _run_row(row: dict[str, Any], *, run: Callable[[Any], Any]) -> dict[str, Any]:
    return {"item": run(row["item"])}
