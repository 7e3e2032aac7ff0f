"""Causal self-attention with the heads cut over the tensor-parallel ranks.

Each rank keeps H/tp query heads and the key and value heads that they read: G/tp of them, or one that
it shares with its neighbours when G < tp. So attention itself needs no communication. The kernel is torch's scaled_dot_product_attention.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from raymega.config.schema import ModelSection
from raymega.model.norms import HeadNorms
from raymega.parallel.tensor import ColumnParallelLinear, ParameterFactory, RowParallelLinear


class Attention(nn.Module):
    """softmax(q k^T / sqrt(K)) v over earlier positions; G < H is grouped-query attention."""

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

    def forward(self, x: Tensor) -> Tensor:
        """x: [S/sp, B, D] -> [S/sp, B, D]."""
        H, G = self.num_heads, self.num_kv_heads
        qkv_SBhK = self.qkv(x).unflatten(-1, (H + 2 * G, -1))
        qk_SBhK, v_SBGK = qkv_SBhK.split((H + G, G), dim=2)
        if self.norms is not None:
            qk_SBhK = self.norms(qk_SBhK, num_heads=H)
        q_SBHK, k_SBGK = self.positions(qk_SBhK).split((H, G), dim=2)
        q_BHSK, k_BGSK, v_BGSK = (t.permute(1, 2, 0, 3) for t in (q_SBHK, k_SBGK, v_SBGK))
        y_BHSK = scaled_dot_product_attention(
            q_BHSK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=G < H
        )
        return self.out(y_BHSK.permute(2, 0, 1, 3).flatten(2))
