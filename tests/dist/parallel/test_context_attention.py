"""Attention over context-parallel ranks: output and gradients equal dense attention in float64."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymega.parallel.comm.process_groups import alone
from raymega.parallel.context_parallel.attention import attend
from raymega.parallel.context_parallel.attention_blocks import PLAIN, ScoreRules
from raymega.parallel.context_parallel.context import (
    Context,
    Rows,
    held_positions,
    make_token_layout,
)
from raymega.plan import cp_layout
from raymega.plan.grid import Grid
from tests.support.ranks import run_grid
from tests.support.references import plain_models

pytestmark = pytest.mark.dist

LIMIT = 1e-9
METHODS = ("ring", "all_gather", "all_to_all", "hybrid")
K = 4


def _draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def _dense(q, k, v, rows, rules=PLAIN, sinks=None):
    """Softmax written out, a document at a time. q: [S, B, H, K], sinks: [H]."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("sbhk,tbhk->bhst", q, k) / q.shape[-1] ** 0.5
    num_tokens, num_rows = q.shape[:2]
    lengths = rows if len(rows) > 1 else rows * num_rows
    document = torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    )
    sees = document[:, :, None] == document[:, None]
    sees = sees & torch.ones(num_tokens, num_tokens).tril().bool()
    if rules.window:
        behind = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
        sees = sees & (behind < rules.window)
    if rules.chunk:
        places = [torch.cat([torch.arange(n) for n in row]) // rules.chunk for row in lengths]
        chunks = torch.stack(places)
        sees = sees & (chunks[:, :, None] == chunks[:, None])
    if rules.softcap:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    scores = scores.masked_fill(~sees[:, None], -torch.inf)
    if sinks is not None:  # a key more, without a value
        extra = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, extra), -1)
    weights = scores.softmax(-1)[..., :num_tokens]
    return torch.einsum("bhst,tbhk->sbhk", weights, v)


def _tensors(rows, num_rows, heads, kv_heads):
    tokens = sum(rows[0])
    shapes = [(tokens, num_rows, h, K) for h in (heads, kv_heads, kv_heads, heads)]
    return [_draw(seed, *shape) for seed, shape in enumerate(shapes)]


def _context(groups, method):
    if method in ("ring", "all_gather"):
        nobody = alone(groups.cp.ranks[groups.cp.index])
        return Context(inner=nobody, outer=groups.cp, is_gathered=method == "all_gather")
    return Context(inner=groups.cp_inner, outer=groups.cp_outer)


def _run(env, method, rows, shape, rules=PLAIN, has_sinks=False):
    context = _context(env.groups, method)
    held = held_positions(rows, context)
    token_layout = make_token_layout(Rows(held, rows), context)
    at = held.t().expand(-1, shape[0])
    *inputs, grad = (t[at, torch.arange(shape[0])] for t in _tensors(rows, *shape))
    leaves = [t.clone().requires_grad_() for t in inputs]
    sinks = _draw(9, shape[1]).requires_grad_() if has_sinks else None
    y = attend(*leaves, token_layout, rules=rules, sinks=sinks)
    y.backward(grad)
    return at, y.detach(), *(leaf.grad for leaf in leaves), None if sinks is None else sinks.grad


def _check(cp, method, rows, shape, *, inner=2, rules=PLAIN, has_sinks=False):
    """``shape``: rows of the micro-batch, query heads, key heads."""
    inner = {"all_to_all": cp, "hybrid": inner}.get(method, 1)
    grid, options = Grid(cp=cp), (rules, has_sinks)
    results = run_grid(_run, grid, method, rows, shape, *options, hierarchical_cp_size=inner)
    *inputs, grad = _tensors(rows, *shape)
    leaves = [t.requires_grad_() for t in inputs]
    sinks = _draw(9, shape[1]).requires_grad_() if has_sinks else None
    wanted = _dense(*leaves, rows, rules, sinks)
    wanted.backward(grad)
    if sinks is not None:  # every rank has some tokens or some heads: terms of a sum
        found = sum(result[-1] for result in results)
        assert plain_models.difference(found, sinks.grad) < LIMIT, "sinks"
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


ROWS = {"whole": ((32,),), "packed": ((24, 8), (8, 24))}
RULES = {
    "shorter-than-a-chunk": ScoreRules(window=3),
    "over-chunks": ScoreRules(window=11),
    "longer-than-a-row": ScoreRules(window=40, softcap=1.3),
    "cap": ScoreRules(softcap=0.7),
    "chunks": ScoreRules(chunk=5),
    "chunks-longer-than-a-row": ScoreRules(chunk=40, softcap=1.3),
    "none": PLAIN,
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    ("method", "cp"),
    [("ring", 1), ("ring", 2), ("ring", 4), ("all_gather", 4), ("all_to_all", 2), ("hybrid", 4)],
)
def test_windows_caps_and_sinks_equal_dense(method, cp, rules, rows):
    shape = (len(ROWS[rows]), 4, 2)
    _check(cp, method, ROWS[rows], shape, rules=RULES[rules], has_sinks=rules != "cap")


def test_blocks_of_a_long_row_are_tiles(monkeypatch):
    """Tiles of 5 queries, so that a window spans several, and no tile has all keys."""
    monkeypatch.setattr(cp_layout, "TILE", 5)
    for rules in RULES.values():
        _check(1, "ring", ((32,),), (1, 4, 2), rules=rules, has_sinks=True)


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
