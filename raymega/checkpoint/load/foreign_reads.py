"""Errors in reading checkpoints of others: the weights that a run starts with, adapters, and a live teacher.

By a CheckpointError at a start the driver knows that a checkpoint of the run itself is unreadable, and passes it
over. What belongs to another run says nothing about this one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from raymega.errors import CheckpointError, StorageError


@contextmanager
def foreign_read(field: str, uri: str) -> Iterator[None]:
    """Raise what is wrong with the checkpoint that ``field`` names as an error that counts as a failed attempt.

    Raises:
        StorageError: The checkpoint at ``uri`` is damaged, or a file of it is gone.
    """
    try:
        yield
    except CheckpointError as error:
        faults = (replace(each, fact=f"{field}={uri!r}: {each.fact}") for each in error.faults)
        raise StorageError(*faults) from error
