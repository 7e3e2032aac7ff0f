"""Attention core: softmax(q k^T) v of this rank's heads, with or without dropout on the weights.

`parallel/context_parallel/attention.py` chooses the kernel and reaches tokens on other context-parallel
ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raymega.config.schema import ModelSection
from raymega.parallel.context_parallel.attention import attend
from raymega.parallel.context_parallel.attention_blocks import PLAIN, ScoreRules
from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.core.dropout import TokenKeys, dropout, place_key
from raymega.parallel.tensor_parallel.layers import ParameterFactory


class WeightDropout(nn.Module):
    """Dropout on attention weights, with a key for each global head: masks do not depend on tp."""

    head_keys: Tensor

    def __init__(self, factory: ParameterFactory, name: str, model: ModelSection) -> None:
        super().__init__()
        self.rate = model.attention_dropout
        if not self.rate:
            return
        num_heads = model.num_heads // factory.tp.size
        first = factory.tp.index * num_heads
        heads = range(first, first + num_heads)
        keys = [place_key(factory.seed, f"{name}.weights.{head}") for head in heads]
        head_keys = torch.tensor(keys, device=factory.device)
        self.register_buffer("head_keys", head_keys, persistent=False)

    def forward(self, weights: Tensor, keys: TokenKeys | None) -> Tensor:
        """Drop some of the weights [B, H/tp, Q, K] of whole rows; without keys of these, return them."""
        if keys is None or keys.rows is None:
            return weights
        return dropout(weights, self.row_keys(keys), rate=self.rate)

    def row_keys(self, keys: TokenKeys, heads: slice = slice(None)) -> Tensor:
        """Return the keys of rows of weights, [B, h, Q] int64, of some of this rank's heads."""
        assert keys.rows is not None, "there is dropout"
        return keys.rows.t()[:, None] + self.head_keys[heads][:, None]


class CoreAttention(nn.Module):
    """Attention within a document: softmax(q k^T / sqrt(K)) v, by a layer's rules of scores."""

    def __init__(
        self, factory: ParameterFactory, name: str, model: ModelSection, rules: ScoreRules = PLAIN
    ) -> None:
        super().__init__()
        self.rules = rules
        self.sinks = factory.make_if_any(f"{name}.sinks.bias")
        self.dropout = WeightDropout(factory, name, model)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, token_layout: TokenLayout) -> Tensor:
        """Map q [S/cp, B, H/tp, K], k [S/cp, B, G/tp, K], v [..., V], V <= K, to [S/cp, B, H/tp * V]."""
        is_dropped = token_layout.keys is not None and token_layout.keys.rows is not None
        drop = partial(self._drop, token_layout=token_layout) if is_dropped else None
        rules, sinks = self.rules, self.sinks
        y = attend(q, k, v, token_layout, on_whole_rows=drop, rules=rules, sinks=sinks)
        return y.flatten(2)

    def _drop(self, q: Tensor, k: Tensor, v: Tensor, *, token_layout: TokenLayout) -> Tensor:
        """Attend over whole rows with dropout on the weights; q: [S, B, h, K], some of the tp rank's heads."""
        assert token_layout.keys is not None, "there is dropout"
        # Ulysses: this rank has all positions of some of the heads.
        first = token_layout.context.inner.index * q.shape[2]
        rows = self.dropout.row_keys(token_layout.keys, slice(first, first + q.shape[2]))
        q_BHSK, k_BGSK, v_BGSK = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        y_BHSK = dropped_attention(
            q_BHSK, k_BGSK, v_BGSK, rows, rate=self.dropout.rate, is_causal=self.rules.is_causal
        )
        return y_BHSK.permute(2, 0, 1, 3)


def dropped_attention(  # a kernel's arguments
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, *, rate: float, is_causal: bool = True
) -> Tensor:
    """Return dropout(softmax(q k^T / sqrt(K))) v, unfused.

    No fused kernel takes masks from our random keys. So backward keeps the S x S weights of every head,
    their mask and the dropped weights: the 5 as^2b bytes of bf16 that fused attention saves (Korthikanti
    et al. 2022).

    Args:
        q: Queries, [B, H, S, K].
        k: Keys, [B, G, S, K]; H / G neighbouring query heads read one key head.
        v: Values, [B, G, S, K].
        keys: Random keys of the queries' rows of weights, [B, H, S] int64.
        rate: Dropout rate.
        is_causal: Whether a token sees no later ones.

    Returns:
        [B, H, S, K].
    """
    groups = k.shape[1]
    weights = _Weights.apply(q.unflatten(1, (groups, -1)), k, is_causal)
    kept = dropout(weights, keys.unflatten(1, (groups, -1)), rate=rate)
    # One GEMM a key head: a broadcast v would be copied and saved once a query head.
    return _Product.apply(kept.flatten(2, 3), v).unflatten(2, kept.shape[2:4]).flatten(1, 2)


class _Weights(torch.autograd.Function):
    """Softmax(q k^T / sqrt(K)) that saves q, k and the weights, but no scores and no mask."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, is_causal: bool) -> Tensor:  # noqa: FBT001  # by position
        """Map q [B, G, R, S, K] and k [B, G, S, K] to weights [B, G, R, S, S]; R = H / G."""
        ctx.scale = q.shape[-1] ** -0.5
        scores = (q.flatten(2, 3) @ k.mT).mul_(ctx.scale).unflatten(2, q.shape[2:4])
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
            scores.masked_fill_(later, float("-inf"))
        # For narrow dtypes the softmax kernel still exponentiates and sums in fp32.
        weights = scores.softmax(-1)
        ctx.save_for_backward(q, k, weights)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k, weights = ctx.saved_tensors
        grad = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
        grad = grad.mul_(ctx.scale).flatten(2, 3)
        return (grad @ k).unflatten(2, q.shape[2:4]), grad.mT @ q.flatten(2, 3), None


class _Product(torch.autograd.Function):
    """Product a @ b that saves both inputs; torch's matmul saves a copy of a strided b (a view of qkv)."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad @ b.mT, a.mT @ grad
