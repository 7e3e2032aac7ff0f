"""Reads the document lengths of a run's first step, for plans; it reads no tokens.

It reads only datasets in local folders and copies none from an object store.
"""

from __future__ import annotations

from raymega.config.schema import Job
from raymega.data.open_split import open_split, shape_of
from raymega.data.order import sample_window
from raymega.data.packing import PackedSource
from raymega.data.synthetic import SYNTHETIC_PATH
from raymega.storage.registry import local_path


def first_rows(job: Job) -> list[list[int]]:
    """Return the document lengths in each row of the first global batch, in sample order.

    The list is empty when the job does not pack, or its data are in an object store.

    Raises:
        ConfigError: There is no dataset at the path.
        DataError: The dataset is damaged or has no document lengths.
    """
    path, seed = job.data.path, job.run.seed
    is_here = path == SYNTHETIC_PATH or local_path(path) is not None
    if job.data.packing == "none" or not is_here:
        return []
    source = open_split(path, "train", shape_of(job.data), seed=seed)
    assert isinstance(source, PackedSource), "rows of a packed split are packed"
    windows = (
        sample_window(seed, source.num_windows, sample)
        for sample in range(job.data.global_batch_size)
    )
    # Only the packing is needed, no tokens.
    return [[held.length for held in source.held(window)] for window in windows]
