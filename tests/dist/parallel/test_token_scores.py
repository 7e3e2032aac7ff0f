"""Scores of tokens from a cut and padded vocabulary equal torch's log-softmax over the whole one."""

from unittest.mock import patch

import pytest
import torch

from raymega.parallel.tensor_parallel import token_scores as module
from raymega.parallel.tensor_parallel.cross_entropy import num_real_columns
from raymega.parallel.tensor_parallel.token_scores import token_scores, top_tokens
from raymega.plan.grid import Grid
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist
S, B, V, K = 5, 3, 20, 4
TABLES = {"no padding": 20, "some": 24, "ranks with padding only": 64}


def _inputs(columns, dtype):
    """Logits with ties, among them ties of the largest; columns of padding are the largest of all."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(S, B, columns, generator=generator).mul(4).round().double() / 2
    logits[..., V:] = 100.0
    labels = torch.randint(0, V, (S, B), generator=generator)
    labels[0] = logits[0, :, :V].argmax(-1)
    return logits.to(dtype), labels


def _run(env, columns, dtype, portion=module.MAX_PORTION):
    tp = env.groups.tp
    logits, labels = _inputs(columns, dtype)
    num_rows = columns // tp.size
    mine = logits[..., tp.index * num_rows :][..., : num_real_columns(num_rows, tp, V)]
    with patch.object(module, "MAX_PORTION", portion):
        scores = token_scores(mine, labels, tp, num_rows=num_rows)
    return scores.log_probs, scores.is_greedy, *top_tokens(mine, K, tp, num_rows=num_rows)


@pytest.mark.parametrize("columns", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_scores_are_those_of_the_whole_vocabulary(tp, columns):
    results = run_grid(_run, Grid(tp=tp), columns, torch.float64)
    logits, labels = _inputs(columns, torch.float64)
    real = logits[..., :V]
    wanted = real.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    order = real.sort(dim=-1, descending=True, stable=True)
    for log_probs, is_greedy, values, ids in results:
        assert torch.allclose(log_probs, wanted, rtol=1e-13, atol=1e-13)
        assert torch.equal(is_greedy, real.argmax(-1) == labels) and is_greedy[0].all()
        assert torch.equal(values, order.values[..., :K]) and torch.equal(
            ids, order.indices[..., :K]
        )


def test_narrow_logits_are_scored_in_float32():
    ((log_probs, *_),) = run_grid(_run, Grid(), 24, torch.bfloat16)
    assert log_probs.dtype == torch.float32


def test_portions_of_the_logits_give_the_bits_of_all_at_once():
    whole = run_grid(_run, Grid(tp=2), 24, torch.bfloat16)
    # 15 tokens, 12 columns a rank at most: portions of 4 tokens and a rest, and of one token
    for portion in (48, 1):
        for rank, other in zip(
            whole, run_grid(_run, Grid(tp=2), 24, torch.bfloat16, portion), strict=True
        ):
            assert all(map(torch.equal, rank, other))
