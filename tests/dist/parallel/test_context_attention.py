"""Attention over context-parallel ranks: output and gradients equal dense attention in float64."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymega.parallel.comm.process_groups import alone
from raymega.parallel.context_parallel.attention import attend
from raymega.parallel.context_parallel.context import (
    Context,
    Rows,
    held_positions,
    make_token_layout,
)
from raymega.plan.grid import Grid
from tests.support.ranks import run_grid
from tests.support.references import plain_models

pytestmark = pytest.mark.dist

LIMIT = 1e-9
METHODS = ("ring", "all_gather", "all_to_all", "hybrid")
K = 4


def _draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def _dense(q, k, v, rows):
    """Softmax written out, a document at a time. q: [S, B, H, K]."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("sbhk,tbhk->bhst", q, k) / q.shape[-1] ** 0.5
    num_tokens, num_rows = q.shape[:2]
    lengths = rows if len(rows) > 1 else rows * num_rows
    document = torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    )
    sees = document[:, :, None] == document[:, None]
    sees = sees & torch.ones(num_tokens, num_tokens).tril().bool()
    weights = scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhst,tbhk->sbhk", weights, v)


def _tensors(rows, num_rows, heads, kv_heads):
    tokens = sum(rows[0])
    shapes = [(tokens, num_rows, h, K) for h in (heads, kv_heads, kv_heads, heads)]
    return [_draw(seed, *shape) for seed, shape in enumerate(shapes)]


def _context(groups, method):
    if method in ("ring", "all_gather"):
        nobody = alone(groups.cp.ranks[groups.cp.index])
        return Context(inner=nobody, outer=groups.cp, is_gathered=method == "all_gather")
    return Context(inner=groups.hierarchical_cp_size, outer=groups.cp_outer)


def _run(env, method, rows, shape):
    context = _context(env.groups, method)
    held = held_positions(rows, context)
    token_layout = make_token_layout(Rows(held, rows), context)
    at = held.t().expand(-1, shape[0])
    *inputs, grad = (t[at, torch.arange(shape[0])] for t in _tensors(rows, *shape))
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = attend(*leaves, token_layout)
    y.backward(grad)
    return at, y.detach(), *(leaf.grad for leaf in leaves)


def _check(cp, method, rows, shape, *, inner=2):
    """``shape``: rows of the micro-batch, query heads, key heads."""
    inner = {"all_to_all": cp, "hybrid": inner}.get(method, 1)
    results = run_grid(_run, Grid(cp=cp), method, rows, shape, hierarchical_cp_size=inner)
    *inputs, grad = _tensors(rows, *shape)
    leaves = [t.requires_grad_() for t in inputs]
    wanted = _dense(*leaves, rows)
    wanted.backward(grad)
    for i, whole in enumerate((wanted, *(leaf.grad for leaf in leaves)), start=1):
        found = torch.full_like(whole, torch.nan)
        for result in results:
            found[result[0], torch.arange(shape[0])] = result[i]
        assert plain_models.difference(found, whole) < LIMIT, f"tensor {i}"


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("method", "cp"),
    [(m, cp) for m in METHODS for cp in (1, 2, 4, 8) if m != "hybrid" or cp >= 4],
    ids=lambda value: str(value),
)
def test_attention_equals_dense(method, cp):
    _check(cp, method, ((32,),), (2, 8, 8))


@pytest.mark.sample(4)
@pytest.mark.parametrize("cp, method, inner, kv_heads", [
    (2, "ring", 1, 2), (4, "ring", 1, 1), (3, "ring", 1, 2), (2, "all_gather", 1, 2),
    (3, "all_gather", 1, 1), (2, "all_to_all", 2, 2), (4, "all_to_all", 4, 2),
    (4, "all_to_all", 4, 1), (3, "all_to_all", 3, 1), (4, "hybrid", 2, 1), (6, "hybrid", 3, 3),
    (6, "hybrid", 2, 2), (8, "hybrid", 4, 2),
])  # fmt: skip
def test_query_heads_may_share_keys(cp, method, inner, kv_heads):
    _check(cp, method, ((48,),), (1, 12 if cp in (3, 6) else 8, kv_heads), inner=inner)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(
        [
            (1, "ring"),
            (2, "ring"),
            (4, "ring"),
            (2, "all_gather"),
            (4, "all_gather"),
            (2, "all_to_all"),
            (4, "hybrid"),
        ]
    ),
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=2),
    st.sampled_from([4, 2]),
)
def test_documents_of_any_length_see_only_themselves(place, counts, kv_heads):
    cp, method = place
    longest = max(sum(row) for row in counts)
    rows = tuple(
        tuple(2 * cp * n for n in (*row, *([longest - sum(row)] if sum(row) < longest else ())))
        for row in counts
    )
    _check(cp, method, rows, (len(rows), 4, kv_heads))
