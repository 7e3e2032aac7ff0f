"""What a small model learns of a corpus sorted by topic: in blocks of shards as much as from a full permutation."""

import numpy as np
import pytest
import torch

from raymega.data.order import RowOrder
from raymega.data.rows import ShardRows

pytestmark = pytest.mark.wide

TOPICS, SHARDS, ROWS, SEQ_LEN, VOCAB, BATCH, WIDTH = 5, 400, 16, 32, 48, 32, 32
SEEDS = range(5)


def _corpus(random, shards, rows):
    """Rows of Markov chains, one a topic; shards follow each other by topic."""
    chains = random.dirichlet(np.full(VOCAB, 0.05), (TOPICS, VOCAB)).cumsum(axis=-1)
    topic = np.repeat(np.arange(shards) * TOPICS // shards, rows)
    tokens = np.empty((len(topic), SEQ_LEN + 1), dtype=np.int64)
    tokens[:, 0] = random.integers(0, VOCAB, len(topic))
    for at in range(SEQ_LEN):
        draws = random.random((len(topic), 1))
        tokens[:, at + 1] = (chains[topic, tokens[:, at]] < draws).sum(axis=1).clip(max=VOCAB - 1)
    return torch.from_numpy(tokens), topic


class _Model(torch.nn.Module):
    """Next token from the last one and the mean of all before, by which topics differ."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(2 * WIDTH, 4 * WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(4 * WIDTH, VOCAB),
        )

    def loss(self, tokens):
        x = self.embedding(tokens[:, :-1])
        mean = x.cumsum(dim=1) / torch.arange(1, SEQ_LEN + 1)[:, None]
        logits = self.body(torch.cat([x, mean], dim=-1))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _valid_loss(train, valid, order, seed):
    torch.manual_seed(seed)
    model = _Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    steps = order.num_rows // BATCH
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    for first in range(0, steps * BATCH, BATCH):
        rows = [order.row(sample) for sample in range(first, first + BATCH)]
        optimizer.zero_grad()
        model.loss(train[rows]).backward()
        optimizer.step()
        decay.step()
    with torch.no_grad():
        return float(model.loss(valid))


def test_blocks_of_a_fortieth_are_learned_as_well_as_a_full_permutation(capsys):
    both, _ = _corpus(np.random.default_rng(0), SHARDS, ROWS + 2)
    shards = both.view(SHARDS, ROWS + 2, SEQ_LEN + 1)
    train, valid = shards[:, :ROWS].flatten(0, 1), shards[:, ROWS:].flatten(0, 1)
    sizes = ShardRows(rows=np.full(SHARDS, ROWS), num_bytes=np.full(SHARDS, 100))
    found = {}
    for name, block_bytes in (("full", 1 << 40), ("blocks", 100 * SHARDS // 40), ("by shard", 100)):
        found[name] = [
            _valid_loss(train, valid, RowOrder(sizes, seed=seed, block_bytes=block_bytes), seed)
            for seed in SEEDS
        ]
    means = {name: float(np.mean(losses)) for name, losses in found.items()}
    spread = float(np.std(found["full"], ddof=1))
    with capsys.disabled():
        print(f"\n  validation losses {means}, spread of seeds {spread:.4f}")
    assert abs(means["blocks"] - means["full"]) < 2 * spread
