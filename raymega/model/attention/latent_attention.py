"""Multi-head latent attention (DeepSeek-V2, 2024), with heads sharded over the tensor-parallel ranks.

All heads' keys and values of a token are projections of one latent of kv_lora_rank features, its queries
of one of q_lora_rank. Every rank computes the latents of its own positions of the residual stream, and
its own heads of all positions. `core_attention.py` attends.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from raymega.config.schema import ModelSection
from raymega.model.attention.core_attention import CoreAttention
from raymega.model.attention.rope import score_scale
from raymega.model.layers.norms import Norm
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
    ReplicatedLinear,
    RowParallelLinear,
)


class Indexer(nn.Module):
    """Weights of DeepSeek-V3.2's indexer, held for checkpoints and export; it runs nowhere.

    It chooses the index_topk tokens that a token attends to: all, in rows that are no longer.
    """

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        ends = ("q_up.weight", "k.weight", "head_weights.weight", "k_norm.weight", "k_norm.bias")
        self.weights = nn.ParameterList(factory.make(f"{name}.{end}") for end in ends)


class LatentAttention(nn.Module):
    """Attention softmax(scale * q k^T) v, whose q and k have a part without position and a rotary one.

    The rotary part of k comes straight from the residual stream and is shared by all heads. With
    ``is_remade`` backward recomputes everything between the up-projections and the output projection.
    """

    is_remade = False

    def __init__(
        self, factory: ParameterFactory, name: str, model: ModelSection, positions: nn.Module
    ) -> None:
        super().__init__()
        mla = model.mla
        self.num_heads = model.num_heads // factory.tp.size
        self.latents = (mla.q_lora_rank, mla.kv_lora_rank, mla.qk_rope_head_dim)
        self.q_parts = (mla.qk_nope_head_dim, mla.qk_rope_head_dim)
        self.kv_parts = (mla.qk_nope_head_dim, mla.v_head_dim)
        self.score_scale = score_scale(model)
        self.sp = factory.sp
        self.positions = positions
        q_down = (f"{name}.q_down",) if mla.q_lora_rank else ()
        self.down = ReplicatedLinear(factory, *q_down, f"{name}.kv_down")
        self.q_norm = (
            Norm(factory, f"{name}.q_latent_norm", "rms_norm", model.norm_eps) if q_down else None
        )
        self.q = ColumnParallelLinear(factory, f"{name}.q_up" if q_down else f"{name}.q")
        self.kv_norm = Norm(factory, f"{name}.kv_latent_norm", "rms_norm", model.norm_eps)
        self.kv = ColumnParallelLinear(factory, f"{name}.kv_up")
        self.core = CoreAttention(factory, name, model)
        self.indexer = Indexer(factory, f"{name}.indexer") if mla.index_n_heads else None
        self.out = RowParallelLinear(factory, f"{name}.out")

    def forward(self, x: Tensor, token_layout: TokenLayout | None = None) -> Tensor:
        """Map x [S/sp, B, D] to the same shape; without a layout each row is one document on this rank."""
        # down-projections: latents of this rank's positions
        q_latent, kv_latent, k_turned = recompute_input(self.down, x).split(self.latents, dim=-1)
        # up-projections: this rank's heads of all positions
        q = self.q(self.q_norm(q_latent)) if self.q_norm is not None else recompute_input(self.q, x)
        kv = self.kv(self.kv_norm(kv_latent))
        k_turned = self.sp.enter(k_turned)
        # attention and output projection
        if token_layout is None:
            token_layout = make_token_layout(whole_rows(q.shape[0], q.device), no_context())
        inside = partial(self._attend, token_layout=token_layout)
        if not self.is_remade:
            return self.out(inside(q, kv, k_turned))
        return recompute_input(self.out, checkpoint_output(inside, q, kv, k_turned))

    def _attend(
        self, q: Tensor, kv: Tensor, k_turned: Tensor, *, token_layout: TokenLayout
    ) -> Tensor:
        """Assemble heads from the projections, and attend.

        Args:
            q: Queries, [S/cp, B, H/tp * (N + R)]; each head has N features without position, R rotary.
            kv: Keys and values, [S/cp, B, H/tp * (N + V)]; each head has N features of the key, V of the value.
            k_turned: Rotary part of the keys, [S/cp, B, R].
            token_layout: Positions and rotations of these tokens.

        Returns:
            [S/cp, B, H/tp * V].
        """
        H = self.num_heads
        q_plain, q_turned = q.unflatten(-1, (H, -1)).split(self.q_parts, dim=-1)
        k_plain, v = kv.unflatten(-1, (H, -1)).split(self.kv_parts, dim=-1)
        # rotate; the one rotary key is expanded to all heads
        q_turned = self.positions(q_turned, token_layout.rotations)
        k_turned = self.positions(k_turned.unsqueeze(2), token_layout.rotations).expand(
            -1, -1, H, -1
        )
        q_SBHK = torch.cat((q_plain, q_turned), dim=-1)
        # YaRN scales whole scores: here through q, in place of a larger softmax scale.
        if self.score_scale != 1:
            q_SBHK = q_SBHK.mul_(self.score_scale)
        k_SBHK = torch.cat((k_plain, k_turned), dim=-1)
        if v.shape[-1] == k_SBHK.shape[-1]:
            v = (
                v.contiguous()
            )  # or it would keep the keys' part of kv too; a narrower one is copied
        return self.core(q_SBHK, k_SBHK, v, token_layout)
