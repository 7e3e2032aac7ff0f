"""What each rank reads under dynamic context parallelism, put together again."""

import numpy as np
import pytest

from raymega.config.data import DataSource
from raymega.data.blends.mixture import Mixture
from raymega.data.dynamic_loader import DynamicLoader
from raymega.data.packing import PackedSource
from raymega.data.samples import Samples
from raymega.parallel.comm.process_groups import Group, alone
from raymega.parallel.context_parallel.context import Context
from raymega.plan.batch import make_batch
from raymega.plan.packing.cost import PackCost
from raymega.plan.packing.dynamic_cp import PackLimits
from tests.unit.data.datasets import samples_of

SEQ_LEN, RANKS = 20, 4
WIDE = PackCost(token_s=1.0, pair_s=1.0)
"""The more ranks share a document the better, so packs are padded as far as they ever are."""


class Counting:
    """Token i of document d is 1000 d + i + 1, counted on from ``first``."""

    def __init__(self, lengths, *, first=0):
        self.lengths, self._first = np.array(lengths, dtype=np.int64), first
        self.shards = [(len(lengths), 8)]

    def need(self, shards):
        pass

    is_truncated = False

    def counted(self, document, start, stop):
        return None

    def read(self, document, start, stop):
        return 1000 * (self._first + document) + np.arange(start, stop) + 1


def _contexts(rank):
    sizes = (size for size in (1, 2, 4) if size <= RANKS)
    groups = (
        Group(
            name="cp", ranks=tuple(range(rank // n * n, rank // n * n + n)), index=rank % n,
            timeout_s=1.0, handle=None,
        )
        for n in sizes
    )  # fmt: skip
    return {group.size: Context(inner=alone(rank), outer=group) for group in groups}


def _micro_batches(lengths, *, multiple=1):
    """Of all ranks, one step with all rows."""
    source = PackedSource(Counting(lengths), seq_len=SEQ_LEN, window=64)
    return _batches_of(samples_of(source), source.num_windows, multiple=multiple)


def _batches_of(samples, num_samples, *, multiple=1):
    batch = make_batch(global_batch_size=num_samples, micro_batch_size=1, dp=RANKS)
    limits = PackLimits(num_ranks=RANKS, max_tokens=SEQ_LEN, multiple=multiple)
    for rank in range(RANKS):
        loader = DynamicLoader(
            samples,
            rank=rank,
            contexts=_contexts(rank),
            limits=limits,
            cost=WIDE,
            device="cpu",
        )
        yield from loader.micro_batches(batch, 0)


@pytest.mark.parametrize("multiple", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[20, 1, 1, 2], [20] * 8, [19, 20, 3, 7, 1, 45], [1]])
def test_ranks_read_every_token_once(lengths, multiple):
    batches = list(_micro_batches(lengths, multiple=multiple))
    found = sorted(int(token) for batch in batches for token in batch.tokens.flatten() if token)
    assert found == [1000 * d + i + 1 for d, length in enumerate(lengths) for i in range(length)]


def test_documents_of_a_blend_share_packs():
    """Rows of two datasets in turns; a pack may hold documents of both."""
    entries = [DataSource(path="a"), DataSource(path="b")]
    sources = [
        PackedSource(Counting([20, 6, 7, 8], first=first), seq_len=SEQ_LEN, window=64)
        for first in (0, 4)
    ]
    assert [source.num_windows for source in sources] == [3, 3]
    samples = Samples(sources, Mixture([(0, entries)]), seed=3, block_bytes=1)
    batches = list(_batches_of(samples, 6))
    found = sorted(int(token) for batch in batches for token in batch.tokens.flatten() if token)
    lengths = [20, 6, 7, 8] * 2
    assert found == [1000 * d + i + 1 for d, length in enumerate(lengths) for i in range(length)]


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_padding_has_positions_that_a_model_of_rows_of_that_length_has(multiple):
    """A document of 20 tokens is padded to 24 for 4 ranks; the model's tables may have 20 rows."""
    batches = list(_micro_batches([20, 1, 1, 2], multiple=multiple))
    assert max(batch.rows.context.degree for batch in batches) == 4
    for batch in batches:
        positions = batch.rows.positions
        assert int(positions.min()) >= 0 and int(positions.max()) < SEQ_LEN


@pytest.mark.parametrize("multiple", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[20, 1, 1, 2], [19, 12, 3, 7, 1], [20, 6, 7, 8] * 2], ids=str)
def test_positions_are_those_in_the_document_and_in_the_sample(lengths, multiple):
    """Token i of document d is 1000 d + i + 1, so it tells its position; its sample's row has it too."""
    source = PackedSource(Counting(lengths), seq_len=SEQ_LEN, window=64)
    samples, sizes = samples_of(source), set()
    for batch in _batches_of(samples, source.num_windows, multiple=multiple):
        sizes.add(batch.rows.context.degree)
        for token, position, place, sample in zip(
            *(t.flatten().tolist() for t in (batch.tokens, batch.rows.positions, batch.rows.row_positions)),
            batch.samples.flatten().tolist(), strict=True,
        ):  # fmt: skip
            if token:
                assert position == (token - 1) % 1000
                assert samples.row(sample).tokens[place] == token
    assert max(sizes) > 1, "some document is shared"
