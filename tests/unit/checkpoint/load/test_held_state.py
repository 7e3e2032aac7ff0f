"""State in memory becomes a rank's blocks, wherever the buckets of what is held were cut."""

import torch

from raymega.checkpoint.load.held_state import fill
from tests.unit.checkpoint.support import MODELS, make_blocks, make_grid, same

MODEL = MODELS["llama-untied"]


def _blocks(layout, *ranks, is_filled=True):
    """Blocks of the ranks, each once, though all have the norms."""
    grid = make_grid(layout)
    of_ranks = (make_blocks(MODEL, grid, rank, is_filled=is_filled) for rank in ranks)
    return [*{(block.name, block.box): block for blocks in of_ranks for block in blocks}.values()]


def test_blocks_take_their_elements_of_every_source_that_has_some():
    whole = _blocks("tp1", 0, is_filled=False)
    assert fill(whole, _blocks("tp2", 0, 1))
    assert same(whole, _blocks("tp1", 0))
    # the other half lies beside each block
    half = _blocks("tp2", 0, is_filled=False)
    assert fill(half, _blocks("tp2", 0, 1))
    assert same(half, _blocks("tp2", 0))


def test_nothing_is_copied_where_an_element_is_lacking_or_of_another_dtype():
    lacking = _blocks("tp2", 0)
    other = make_blocks(MODEL, make_grid("tp1"), 0, dtype=torch.bfloat16)
    for sources in (lacking, other):
        whole = _blocks("tp1", 0, is_filled=False)
        assert not fill(whole, sources)
        assert all(block.values.isnan().all() for block in whole)
