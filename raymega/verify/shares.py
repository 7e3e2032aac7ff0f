"""Checkpoint of a layout's ranks: their shares, put together and committed as the driver does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raymega.checkpoint.format.manifest import commit, parse_manifest
from raymega.checkpoint.format.manifest_builder import coverage_faults
from raymega.errors import CheckpointError, raise_faults
from raymega.storage.registry import open_store
from raymega.verify.compare import RankResult


class LayoutFailedError(Exception):
    """Failure of a layout: ranks raised, died or timed out; the text names the first cause."""


def commit_shares(results: Sequence[RankResult], uri: str) -> str:
    """Commit what the ranks have saved to the store at ``uri``, and return the checkpoint's URI.

    Raises:
        LayoutFailedError: The ranks' shares are no checkpoint.
    """
    parts = [parse_manifest(result.manifest.encode(), key="a rank's share") for result in results]
    whole = replace(parts[0], boxes=tuple(box for part in parts for box in part.boxes))
    try:
        raise_faults(CheckpointError, coverage_faults(whole))
        return f"{uri}/{commit(open_store(uri), whole)}"
    except CheckpointError as error:
        raise LayoutFailedError(f"the ranks' shares are no checkpoint: {error}") from error
