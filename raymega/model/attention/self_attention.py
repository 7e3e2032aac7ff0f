"""Causal self-attention with heads sharded over the tensor-parallel ranks.

Each rank holds H/tp query heads and the key and value heads that they read: G/tp of them, or one that
neighbouring ranks replicate when G < tp. So tp needs no communication between the two projections.
`core_attention.py` attends.
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
    """Causal self-attention; G < H is grouped-query attention.

    With ``is_remade`` backward recomputes everything between the two projections.
    """

    is_remade = False

    def __init__(
        self, factory: ParameterFactory, name: str, model: ModelSection, positions: nn.Module
    ) -> None:
        super().__init__()
        self.num_heads = model.num_heads // factory.tp.size
        # G < tp: one key and value head, replicated on neighbouring ranks
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
        """Map x [S/sp, B, D] to the same shape; without a layout each row is one document on this rank."""
        # fused projection to this rank's heads
        qkv = recompute_input(self.qkv, x)
        rows = whole_rows(qkv.shape[0], qkv.device)
        inside = partial(
            self._attend, token_layout=token_layout or make_token_layout(rows, no_context())
        )
        # attention and output projection, with or without recomputation
        if not self.is_remade:
            return self.out(inside(qkv))
        params = () if self.norms is None else tuple(self.norms.parameters())
        return recompute_input(self.out, checkpoint_output(inside, qkv, params=params))

    def _attend(self, qkv: Tensor, token_layout: TokenLayout) -> Tensor:
        """Map qkv [S/cp, B, (H + 2 G)/tp * K] to attention outputs [S/cp, B, H/tp * K]."""
        q_SBHK, k_SBGK, v_SBGK = self._heads(qkv, token_layout)
        return self.core(q_SBHK, k_SBGK, v_SBGK, token_layout)

    def _heads(self, qkv: Tensor, token_layout: TokenLayout) -> HeadParts:
        """Return q [S/cp, B, H/tp, K], k and v [S/cp, B, G/tp, K]; q and k normalised and rotated."""
        H, G = self.num_heads, self.num_kv_heads
        qkv_SBhK = qkv.unflatten(-1, (H + 2 * G, -1))
        # without head norms: split and rotate in one pass
        if self.norms is None:
            if isinstance(self.positions, Rope):
                return self.positions.split(qkv_SBhK, token_layout.rotations, sizes=(H, G))
            q_SBHK, k_SBGK, v_SBGK = qkv_SBhK.split((H, G, G), dim=2)
            return q_SBHK, k_SBGK, v_SBGK
        # with head norms: normalise, then rotate
        qk_SBhK, v_SBGK = qkv_SBhK.split((H + G, G), dim=2)
        if not token_layout.is_whole:
            # Attention saves its own copies of a cp shard, and the norms their input: copy the parts, or
            # the saved view would hold v a second time.
            qk_SBhK, v_SBGK = qk_SBhK.contiguous(), v_SBGK.contiguous()
        qk_SBhK = self.norms(qk_SBhK, num_heads=H)
        if isinstance(self.positions, Rope):
            qk_SBhK = self.positions(qk_SBhK, token_layout.rotations)
        q_SBHK, k_SBGK = qk_SBhK.split((H, G), dim=2)
        return q_SBHK, k_SBGK, v_SBGK
