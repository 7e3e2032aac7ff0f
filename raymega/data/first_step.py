"""Reads the document lengths of a run's first step, for plans; it reads no tokens.

It reads only datasets in local folders and copies none from an object store.
"""

from __future__ import annotations

from raymega.config.data import is_synthetic
from raymega.config.schema import Job
from raymega.data.samples import open_samples
from raymega.storage.registry import local_path


def first_rows(job: Job) -> list[list[int]]:
    """Return the document lengths in each row of the first global batch, in sample order.

    The list is empty when the job does not pack, or its data are in an object store.

    Raises:
        ConfigError: There is no dataset at the path.
        DataError: The dataset is damaged or has no document lengths.
    """
    is_here = all(is_synthetic(path) or local_path(path) for path in job.data.datasets)
    if job.data.packing == "none" or not is_here:
        return []
    samples = open_samples(job)
    # Only the packing is needed, no tokens.
    first = range(job.data.global_batch_size)
    return [[held.length for held in samples.held(sample)] for sample in first]
