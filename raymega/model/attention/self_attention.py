"""Self-attention with heads sharded over the tensor-parallel ranks.

Each rank holds H/tp query heads and the key and value heads that they read: G/tp of them, or one that
neighbouring ranks replicate when G < tp. So tp needs no communication between the two projections.
`core_attention.py` attends.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from raymega.config.schema import ModelSection
from raymega.model.attention.core_attention import CoreAttention
from raymega.model.attention.rope import HeadParts, Rope
from raymega.model.layers.norms import HeadNorms, L2Norm, WholeNorms
from raymega.parallel.context_parallel.attention_blocks import ScoreRules
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
from raymega.plan.layers.layer_pattern import LayerParts


class Attention(nn.Module):
    """Self-attention, causal unless the family sees both sides; G < H is grouped-query attention.

    With ``is_remade`` backward recomputes everything between the two projections.
    """

    is_remade = False

    def __init__(
        self,
        factory: ParameterFactory,
        name: str,
        model: ModelSection,
        positions: nn.Module,
        parts: LayerParts,
    ) -> None:
        super().__init__()
        self.num_heads = model.num_heads // factory.tp.size
        # G < tp: one key and value head, replicated on neighbouring ranks
        self.num_kv_heads = max(1, model.kv_heads // factory.tp.size)
        self.norms: HeadNorms | WholeNorms | None = None
        if parts.family.has_head_norms:
            kind = HeadNorms if parts.family.qk_norm == "heads" else WholeNorms
            is_offset = parts.family.is_norm_offset
            self.norms = kind(factory, name, model.norm_eps, is_offset=is_offset)
        # norms without weights follow the rotation
        self.late_norm: L2Norm | None = None
        if parts.family.qk_norm == "l2" and parts.rope != "none":
            self.late_norm = L2Norm(factory, model)
        self.positions = positions
        self.temperature = (0, 0.0)
        if parts.attention == "no_positions":
            self.temperature = model.attention.temperature_floor, model.attention.temperature_scale
        # Kernels divide scores by sqrt(K): another scale is a factor on the queries.
        scale = model.attention.score_scale
        self.q_factor = scale * model.head_width**0.5 if scale else 1.0
        # features of the output gate, which follow q, k and v
        self.gate_width = self.num_heads * model.head_width * parts.family.has_output_gate
        gate = (f"{name}.gate",) if self.gate_width else ()
        self.qkv = ColumnParallelLinear(factory, f"{name}.q", f"{name}.k", f"{name}.v", *gate)
        self.out = RowParallelLinear(factory, f"{name}.out")
        rules = ScoreRules(
            window=parts.window,
            softcap=model.attention.softcap,
            chunk=parts.chunk,
            is_causal=parts.family.is_causal,
        )
        self.core = CoreAttention(factory, name, model, rules)

    def forward(self, x: Tensor, token_layout: TokenLayout | None = None) -> Tensor:
        """Map x [S/sp, B, D] to the same shape; without a layout each row is one document on this rank."""
        # fused projection to this rank's heads
        qkv = recompute_input(self.qkv, x)
        if token_layout is None:
            token_layout = make_token_layout(whole_rows(qkv.shape[0], qkv.device), no_context())
        inside = partial(self._attend, token_layout=token_layout)
        # attention and output projection, with or without recomputation
        if not self.is_remade:
            return self.out(inside(qkv))
        params = () if self.norms is None else tuple(self.norms.parameters())
        params += () if self.core.sinks is None else (self.core.sinks,)
        return recompute_input(self.out, checkpoint_output(inside, qkv, params=params))

    def _attend(self, qkv: Tensor, token_layout: TokenLayout) -> Tensor:
        """Map qkv [S/cp, B, (H + 2 G)/tp * K] to attention outputs [S/cp, B, H/tp * K]; a gate is [..., H/tp * K] more."""
        gate = None
        if self.gate_width:
            qkv, gate = qkv.split((qkv.shape[-1] - self.gate_width, self.gate_width), dim=-1)
        q_SBHK, k_SBGK, v_SBGK = self._heads(qkv, token_layout)
        if self.q_factor != 1.0:
            q_SBHK = q_SBHK * self.q_factor
        if self.temperature[0]:
            q_SBHK = q_SBHK * self._temperatures(token_layout, q_SBHK)
        y = self.core(q_SBHK, k_SBGK, v_SBGK, token_layout)
        return y if gate is None else y * gate.sigmoid()

    def _temperatures(self, token_layout: TokenLayout, q: Tensor) -> Tensor:
        """Return the factors on queries by their positions, [S/cp, B or 1, 1, 1], in the format of q."""
        floor, scale = self.temperature
        steps = (token_layout.positions + 1) // floor
        wide = steps.to(torch.promote_types(q.dtype, torch.float32))
        return (wide.log1p() * scale + 1.0).to(q.dtype)[..., None, None]

    def _heads(self, qkv: Tensor, token_layout: TokenLayout) -> HeadParts:
        """Return q [S/cp, B, H/tp, K], k and v [S/cp, B, G/tp, K]; q and k normalised and rotated."""
        H, G = self.num_heads, self.num_kv_heads
        qkv_SBhK = qkv.unflatten(-1, (H + 2 * G, -1))
        # without head norms: split and rotate in one pass
        is_by_neighbours = isinstance(self.positions, Rope) and self.positions.is_by_neighbours
        has_norms = self.norms is not None or self.late_norm is not None
        if not has_norms and not is_by_neighbours:
            if isinstance(self.positions, Rope):
                turns = self.positions.turns_of(token_layout)
                return self.positions.split(qkv_SBhK, turns, sizes=(H, G))
            q_SBHK, k_SBGK, v_SBGK = qkv_SBhK.split((H, G, G), dim=2)
            return q_SBHK, k_SBGK, v_SBGK
        # with head norms: normalise, then rotate
        qk_SBhK, v_SBGK = qkv_SBhK.split((H + G, G), dim=2)
        if not token_layout.is_whole:
            # Attention saves its own copies of a cp shard, and the norms their input: copy the parts, or
            # the saved view would hold v a second time.
            qk_SBhK, v_SBGK = qk_SBhK.contiguous(), v_SBGK.contiguous()
        if self.norms is not None:
            qk_SBhK = self.norms(qk_SBhK, num_heads=H)
        if isinstance(self.positions, Rope):
            qk_SBhK = self.positions(qk_SBhK, self.positions.turns_of(token_layout))
        if self.late_norm is not None:
            qk_SBhK = self.late_norm(qk_SBhK)
        q_SBHK, k_SBGK = qk_SBhK.split((H, G), dim=2)
        return q_SBHK, k_SBGK, v_SBGK
