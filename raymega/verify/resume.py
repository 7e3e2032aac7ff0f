"""A run that is saved on one layout and resumed on another, compared with the undisturbed reference."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from raymega.checkpoint.format.manifest import commit, parse_manifest
from raymega.checkpoint.format.manifest_builder import coverage_faults
from raymega.config.schema import Job
from raymega.errors import CheckpointError, raise_faults
from raymega.storage.registry import open_store
from raymega.verify.compare import RankResult
from raymega.verify.launch import ForkServer, LayoutFailedError
from raymega.verify.layout import Layout


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
        with fork_server.run(job, saved, steps=steps - 1, checkpoints=folder) as results:
            key = _commit(results, folder)
        with fork_server.run(job, resumed, steps=steps, checkpoints=folder, restore=key) as results:
            yield results


def _commit(results: Sequence[RankResult], uri: str) -> str:
    """Commit the ranks' shares as one checkpoint, as the driver does, and return its key."""
    parts = [parse_manifest(result.manifest.encode(), key="a rank's share") for result in results]
    whole = replace(parts[0], boxes=tuple(box for part in parts for box in part.boxes))
    try:
        raise_faults(CheckpointError, coverage_faults(whole))
        return commit(open_store(uri), whole)
    except CheckpointError as error:
        raise LayoutFailedError(f"the ranks' shares are no checkpoint: {error}") from error
