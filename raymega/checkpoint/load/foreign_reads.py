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
        remedy = (
            f"set {field} to a copy of it (raymega checkpoint copy), or to another one: a run that is trained "
            "further deletes all but its newest checkpoint.keep_last"
        )
        faults = (
            replace(each, fact=f"{field}={uri!r}: {each.fact}", remedy=remedy)
            for each in error.faults
        )
        raise StorageError(*faults) from error
