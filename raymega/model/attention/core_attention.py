"""Attention between heads that are made already: this rank's, with dropout on the weights or without.

How attention reaches tokens on other context-parallel ranks, and by which kernel, is
parallel.context_attention's; with dropout on the weights it is dropped_attention.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from raymega.config.schema import ModelSection
from raymega.model.attention.dropout_attention import dropped_attention
from raymega.parallel.context_parallel.attention import attend
from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.core.dropout import place_key
from raymega.parallel.tensor_parallel.layers import ParameterFactory


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(K)) v over earlier positions of the same document."""

    head_keys: Tensor

    def __init__(self, factory: ParameterFactory, name: str, model: ModelSection) -> None:
        super().__init__()
        self.dropout = model.attention_dropout
        num_heads = model.num_heads // factory.tp.size
        first = factory.tp.index * num_heads
        heads = range(first, first + num_heads)
        keys = [place_key(factory.seed, f"{name}.weights.{head}") for head in heads]
        head_keys = torch.tensor(keys, device=factory.device)
        self.register_buffer("head_keys", head_keys, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, token_layout: TokenLayout) -> Tensor:
        """q: [S/cp, B, H/tp, K], k: [S/cp, B, G/tp, K], v: like k or narrower -> [S/cp, B, H/tp * V]."""
        is_dropped = token_layout.keys is not None and token_layout.keys.rows is not None
        drop = partial(self._drop, token_layout=token_layout) if is_dropped else None
        return attend(q, k, v, token_layout, on_whole_rows=drop).flatten(2)

    def _drop(self, q: Tensor, k: Tensor, v: Tensor, *, token_layout: TokenLayout) -> Tensor:
        """Over whole rows with dropout on the weights. q: [S, B, h, K], some heads of this tp rank."""
        assert token_layout.keys is not None and token_layout.keys.rows is not None, (
            "there is dropout"
        )
        first = token_layout.context.inner.index * q.shape[2]
        heads = self.head_keys[first : first + q.shape[2]]
        rows = token_layout.keys.rows.t()[:, None] + heads[:, None]
        q_BHSK, k_BGSK, v_BGSK = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        y_BHSK = dropped_attention(q_BHSK, k_BGSK, v_BGSK, rows, rate=self.dropout)
        return y_BHSK.permute(2, 0, 1, 3)
