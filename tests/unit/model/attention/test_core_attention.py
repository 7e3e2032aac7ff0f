"""Attention with dropout on its weights: the formula in float64 with the mask given, and whose heads' masks."""

import pytest
import torch

from raymega.model.attention.core_attention import CoreAttention, dropped_attention
from raymega.parallel.comm.process_groups import Group, alone
from raymega.parallel.context_parallel.context import Context, TokenLayout
from raymega.parallel.core.dropout import TokenKeys, keep_mask, row_keys
from tests.support.references import plain_models
from tests.unit.model.parts import make_factory, make_group, make_stream

B, H, G, S, K, V = 2, 4, 2, 6, 6, 4
RATE = 0.25
KEYS = torch.arange(B * H * S).view(B, H, S) * 7_919_191_919


def _drawn(*shape, seed):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()
    return numbers.requires_grad_()


def _inputs():
    return _drawn(B, H, S, K, seed=1), _drawn(B, G, S, K, seed=2), _drawn(B, G, S, V, seed=3)


def _written_out(q, k, v, kept):
    """Sums of exponentials over earlier positions; of the weights those that are kept, over 1 - RATE."""
    out = torch.zeros(B, H, S, V, dtype=torch.float64)
    for head in range(H):
        keys, values = k[:, head * G // H], v[:, head * G // H]
        for row in range(S):
            seen = slice(0, row + 1)
            scores = (q[:, head, row, None] * keys[:, seen]).sum(-1) / K**0.5
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            weights = weights * kept[:, head, row, seen] / (1 - RATE)
            out[:, head, row] = (weights[..., None] * values[:, seen]).sum(1)
    return out


def test_values_and_gradients_are_those_of_the_formula_with_the_mask_given():
    kept = keep_mask(KEYS, S, rate=RATE)
    assert 0 < (~kept).sum() < kept.numel() / 2
    inputs = _inputs()
    found = dropped_attention(*inputs, KEYS, rate=RATE)
    wanted = _written_out(*inputs, kept)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    upstream = _drawn(B, H, S, V, seed=4).detach()
    gradients, others = (torch.autograd.grad(y, inputs, upstream) for y in (found, wanted))
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-14)


def test_backward_is_the_derivative_of_forward():
    assert torch.autograd.gradcheck(
        lambda q, k, v: dropped_attention(q, k, v, KEYS, rate=RATE), _inputs()
    )


def _core(tp=1, tp_rank=0):
    model = plain_models.make_model("llama", attention_dropout=RATE)
    factory = make_factory([], sp=make_stream(make_group(tp, tp_rank)))
    return CoreAttention(factory, "layers.0.attention", model), model


def _layout(inner):
    """Keys of two whole rows; the ranks of ``inner`` have exchanged heads for positions."""
    keys = row_keys(7, torch.tensor([3, 4]), torch.arange(S)[:, None])
    context = Context(inner=inner, outer=alone(inner.ranks[inner.index]))
    return TokenLayout(
        positions=torch.arange(S)[:, None], segments=(), context=context, order=None,
        keys=TokenKeys(own=keys, everywhere=keys, rows=keys),
    )  # fmt: skip


@pytest.mark.parametrize(("tp", "inner"), [(1, 2), (1, 4), (2, 2)], ids=str)
def test_each_head_has_its_own_mask_whichever_rank_attends_with_it(tp, inner):
    """As under all_to_all: a rank has every position of some heads of its tensor-parallel rank."""
    whole, model = _core()
    heads, width = model.num_heads, model.head_width
    q, k, v = (_drawn(S, 2, heads, width, seed=seed) for seed in range(3))
    wanted = whole._drop(q, k, v, token_layout=_layout(alone(0)))
    some = heads // tp // inner
    for place in range(tp * inner):
        core, _ = _core(tp, place // inner)
        group = Group(
            name="cp", ranks=tuple(range(inner)), index=place % inner, timeout_s=1, handle=None
        )
        held = slice(place * some, (place + 1) * some)
        found = core._drop(
            *(t[:, :, held] for t in (q, k, v)), token_layout=_layout(group)
        )  # fmt: skip
        torch.testing.assert_close(found, wanted[:, :, held], rtol=0, atol=1e-14)
