"""Causal self-attention with the heads cut over the tensor-parallel ranks.

Each rank keeps H/tp query heads and the key and value heads that they read: G/tp of them, or one
that it shares with its neighbours when G < tp. So tp needs no communication here. How attention
reaches tokens on other context-parallel ranks, and by which kernel, is parallel.context_attention's;
with dropout on the weights it is dropped_attention.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from raymega.config.schema import ModelSection
from raymega.model.dropped_attention import dropped_attention
from raymega.model.norms import HeadNorms
from raymega.model.rope import HeadParts, Rope
from raymega.parallel.context import Places, make_places, no_context, whole_rows
from raymega.parallel.context_attention import attend
from raymega.parallel.dropout import place_key
from raymega.parallel.recompute import consume, produce
from raymega.parallel.tensor import ColumnParallelLinear, ParameterFactory, RowParallelLinear


class Attention(nn.Module):
    """softmax(q k^T / sqrt(K)) v over earlier positions; G < H is grouped-query attention.

    With ``is_remade`` backward makes all that lies between the two linears again.
    """

    is_remade = False
    head_keys: Tensor

    def __init__(
        self, factory: ParameterFactory, name: str, model: ModelSection, positions: nn.Module
    ) -> None:
        super().__init__()
        self.num_heads = model.num_heads // factory.tp.size
        self.num_kv_heads = max(1, model.kv_heads // factory.tp.size)
        self.norms = (
            HeadNorms(factory, name, model.norm_eps)
            if f"{name}.q_norm.weight" in factory.table
            else None
        )
        self.positions = positions
        self.qkv = ColumnParallelLinear(factory, f"{name}.q", f"{name}.k", f"{name}.v")
        self.out = RowParallelLinear(factory, f"{name}.out")
        self.dropout = model.attention_dropout
        first = factory.tp.index * self.num_heads
        heads = range(first, first + self.num_heads)
        keys = [place_key(factory.seed, f"{name}.weights.{head}") for head in heads]
        head_keys = torch.tensor(keys, device=factory.device)
        self.register_buffer("head_keys", head_keys, persistent=False)

    def forward(self, x: Tensor, places: Places | None = None) -> Tensor:
        """x: [S/sp, B, D] -> [S/sp, B, D]; without places rows are documents, whole on this rank."""
        qkv = consume(self.qkv, x)
        rows = whole_rows(qkv.shape[0], qkv.device)
        inside = partial(self._attend, places=places or make_places(rows, no_context()))
        if not self.is_remade:
            return self.out(inside(qkv))
        params = () if self.norms is None else tuple(self.norms.parameters())
        return consume(self.out, produce(inside, qkv, params=params))

    def _attend(self, qkv: Tensor, places: Places) -> Tensor:
        """qkv: [S/cp, B, (H + 2 G)/tp * K] -> [S/cp, B, H/tp * K]."""
        q_SBHK, k_SBGK, v_SBGK = self._heads(qkv, places)
        is_dropped = places.keys is not None and places.keys.rows is not None
        drop = partial(self._drop, places=places) if is_dropped else None
        return attend(q_SBHK, k_SBGK, v_SBGK, places, on_whole_rows=drop).flatten(2)

    def _heads(self, qkv: Tensor, places: Places) -> HeadParts:
        """Queries [S/cp, B, H/tp, K], keys and values [S/cp, B, G/tp, K], normalised and turned."""
        H, G = self.num_heads, self.num_kv_heads
        qkv_SBhK = qkv.unflatten(-1, (H + 2 * G, -1))
        if self.norms is None and isinstance(self.positions, Rope):
            return self.positions.split(qkv_SBhK, places.turns, sizes=(H, G))
        qk_SBhK, v_SBGK = qkv_SBhK.split((H + G, G), dim=2)
        if self.norms is not None:
            if not places.is_whole:
                # Attention keeps copies then, and the norms what they read: alone, or v is kept twice.
                qk_SBhK, v_SBGK = qk_SBhK.contiguous(), v_SBGK.contiguous()
            qk_SBhK = self.norms(qk_SBhK, num_heads=H)
        if isinstance(self.positions, Rope):
            qk_SBhK = self.positions(qk_SBhK, places.turns)
        q_SBHK, k_SBGK = qk_SBhK.split((H, G), dim=2)
        return q_SBHK, k_SBGK, v_SBGK

    def _drop(self, q: Tensor, k: Tensor, v: Tensor, *, places: Places) -> Tensor:
        """Over whole rows with dropout on the weights. q: [S, B, h, K], some heads of this tp rank."""
        assert places.keys is not None and places.keys.rows is not None, "there is dropout"
        first = places.context.inner.index * q.shape[2]
        heads = self.head_keys[first : first + q.shape[2]]
        rows = places.keys.rows.t()[:, None] + heads[:, None]
        q_BHSK, k_BGSK, v_BGSK = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        y_BHSK = dropped_attention(q_BHSK, k_BGSK, v_BGSK, rows, rate=self.dropout)
        return y_BHSK.permute(2, 0, 1, 3)
