"""Causal self-attention with the heads cut over the tensor-parallel ranks.

Each rank keeps H/tp query heads and the key and value heads that they read: G/tp of them, or one
that it shares with its neighbours when G < tp. So tp needs no communication here. What happens
between the heads is core_attention's.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from raymega.config.schema import ModelSection
from raymega.model.attention.core_attention import CoreAttention
from raymega.model.attention.rope import HeadParts, Rope
from raymega.model.layers.norms import HeadNorms
from raymega.parallel.context_parallel.context import (
    TokenLayout,
    make_token_layout,
    no_context,
    whole_rows,
)
from raymega.parallel.core.checkpointing import checkpoint_output, recompute_input
from raymega.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    ParameterFactory,
    RowParallelLinear,
)


class Attention(nn.Module):
    """softmax(q k^T / sqrt(K)) v over earlier positions; G < H is grouped-query attention.

    With ``is_remade`` backward makes all that lies between the two linears again.
    """

    is_remade = False

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
        self.core = CoreAttention(factory, name, model)

    def forward(self, x: Tensor, token_layout: TokenLayout | None = None) -> Tensor:
        """x: [S/sp, B, D] -> [S/sp, B, D]; without places rows are documents, whole on this rank."""
        qkv = recompute_input(self.qkv, x)
        rows = whole_rows(qkv.shape[0], qkv.device)
        inside = partial(
            self._attend, token_layout=token_layout or make_token_layout(rows, no_context())
        )
        if not self.is_remade:
            return self.out(inside(qkv))
        params = () if self.norms is None else tuple(self.norms.parameters())
        return recompute_input(self.out, checkpoint_output(inside, qkv, params=params))

    def _attend(self, qkv: Tensor, token_layout: TokenLayout) -> Tensor:
        """qkv: [S/cp, B, (H + 2 G)/tp * K] -> [S/cp, B, H/tp * K]."""
        q_SBHK, k_SBGK, v_SBGK = self._heads(qkv, token_layout)
        return self.core(q_SBHK, k_SBGK, v_SBGK, token_layout)

    def _heads(self, qkv: Tensor, token_layout: TokenLayout) -> HeadParts:
        """Queries [S/cp, B, H/tp, K], keys and values [S/cp, B, G/tp, K], normalised and turned."""
        H, G = self.num_heads, self.num_kv_heads
        qkv_SBhK = qkv.unflatten(-1, (H + 2 * G, -1))
        if self.norms is None:
            if isinstance(self.positions, Rope):
                return self.positions.split(qkv_SBhK, token_layout.rotations, sizes=(H, G))
            q_SBHK, k_SBGK, v_SBGK = qkv_SBhK.split((H, G, G), dim=2)
            return q_SBHK, k_SBGK, v_SBGK
        qk_SBhK, v_SBGK = qkv_SBhK.split((H + G, G), dim=2)
        if not token_layout.is_whole:
            # Attention keeps copies then, and the norms what they read: alone, or v is kept twice.
            qk_SBhK, v_SBGK = qk_SBhK.contiguous(), v_SBGK.contiguous()
        qk_SBhK = self.norms(qk_SBhK, num_heads=H)
        if isinstance(self.positions, Rope):
            qk_SBhK = self.positions(qk_SBhK, token_layout.rotations)
        q_SBHK, k_SBGK = qk_SBhK.split((H, G), dim=2)
        return q_SBHK, k_SBGK, v_SBGK
