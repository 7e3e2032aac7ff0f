"""A run that is saved on one layout and resumed on another, compared with the undisturbed reference."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from raymega.config.schema import Job
from raymega.verify.compare import RankResult
from raymega.verify.launch import ForkServer
from raymega.verify.layout import Layout
from raymega.verify.shares import commit_shares


def resuming_pair(layouts: Sequence[Layout], steps: int) -> tuple[Layout, Layout] | None:
    """Return the layout to save on and one of another grid to resume on; None where there is no such."""
    others = [each for each in layouts[1:] if each.grid() != layouts[0].grid()]
    # one step before the save, and one after it
    return (layouts[0], others[-1]) if others and steps > 1 else None


@contextmanager
def run_resumed(
    fork_server: ForkServer, job: Job, saved: Layout, resumed: Layout, *, steps: int
) -> Iterator[list[RankResult]]:
    """Train on ``saved``, save before the last step, train it on ``resumed``; yield that step's results.

    Raises:
        LayoutFailedError: A rank of either layout failed, or the ranks' shares are no checkpoint.
    """
    with tempfile.TemporaryDirectory(prefix="raymega-verify-") as folder:
        with fork_server.run(job, saved, steps=steps - 1, save_to=folder) as results:
            uri = commit_shares(results, folder)
        with fork_server.run(job, resumed, steps=steps, restore=uri) as results:
            yield results
