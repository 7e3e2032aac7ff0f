"""Causal self-attention with the heads cut over the tensor-parallel ranks.

Each rank keeps H/tp query heads and the key and value heads that they read: G/tp of them, or one
that it shares with its neighbours when G < tp. So attention itself needs no communication. The
kernel is torch's scaled_dot_product_attention; with dropout on the weights, dropped_attention.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from raymega.config.schema import ModelSection
from raymega.model.dropped_attention import dropped_attention
from raymega.model.norms import HeadNorms
from raymega.parallel.dropout import TokenKeys, place_key
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
        self.is_rotary = not isinstance(positions, nn.Identity)
        self.dropout = model.attention_dropout
        first = factory.tp.index * self.num_heads
        heads = range(first, first + self.num_heads)
        keys = [place_key(factory.seed, f"{name}.weights.{head}") for head in heads]
        head_keys = torch.tensor(keys, device=factory.device)
        self.register_buffer("head_keys", head_keys, persistent=False)

    def forward(self, x: Tensor, keys: TokenKeys | None = None) -> Tensor:
        """x: [S/sp, B, D] -> [S/sp, B, D]; without keys nothing is dropped."""
        attend = partial(self._attend, keys=keys)
        qkv = consume(self.qkv, x)
        if not self.is_remade:
            return self.out(attend(qkv))
        params = () if self.norms is None else tuple(self.norms.parameters())
        return consume(self.out, produce(attend, qkv, params=params))

    def _attend(self, qkv: Tensor, keys: TokenKeys | None) -> Tensor:
        """qkv: [S, B, (H + 2 G)/tp * K] -> [S, B, H/tp * K]."""
        H, G = self.num_heads, self.num_kv_heads
        qk_SBhK, v_SBGK = qkv.unflatten(-1, (H + 2 * G, -1)).split((H + G, G), dim=2)
        if self.norms is not None:
            qk_SBhK = self.norms(qk_SBhK, num_heads=H)
        elif self.is_rotary:
            # Alone, or v would keep q and k too as they were before they were turned.
            v_SBGK = v_SBGK.contiguous()
        q_SBHK, k_SBGK = self.positions(qk_SBhK).split((H, G), dim=2)
        q_BHSK, k_BGSK, v_BGSK = (t.permute(1, 2, 0, 3) for t in (q_SBHK, k_SBGK, v_SBGK))
        if keys is None or not self.dropout:
            y_BHSK = scaled_dot_product_attention(
                q_BHSK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=G < H
            )
        else:
            rows = keys.whole.t()[:, None] + self.head_keys[:, None]
            y_BHSK = dropped_attention(q_BHSK, k_BGSK, v_BGSK, rows, rate=self.dropout)
        return y_BHSK.permute(2, 0, 1, 3).flatten(2)
