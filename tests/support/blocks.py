"""Blocks of a whole part of a bucket."""

from raymega.parallel.data_parallel.state_tensors import extent_blocks


def blocks_of(kind, part, values):
    """Yield the tensor blocks of ``part`` of a bucket, whose flat values are ``values``."""
    for extent in part.extents():
        held = values[extent.within(part.begin)]
        yield from extent_blocks(kind, part, extent, held)
