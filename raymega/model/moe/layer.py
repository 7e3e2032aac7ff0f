"""Mixture-of-experts layer, which takes the place of a block's dense feed-forward layer.

Each rank routes its own share of the micro-batch's tokens, with or without sequence parallelism. The
shared expert overlaps with the dispatch and combine of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from raymega.config.moe import MoeSection
from raymega.model.layers.mlp import SwigluMlp
from raymega.model.moe.experts import Experts, MakeMlp, SharedExpert
from raymega.model.moe.local_experts import is_one_node, run_local_experts
from raymega.model.moe.router import Router
from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups, Routing, dispatch_tokens
from raymega.parallel.expert_parallel.token_ids import TokenIds, plain_token_ids
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.parallel.tensor_parallel.mappings import gather_rows, scatter_rows


class MoeLayer(nn.Module):
    """Router, experts and shared expert; tensors are named ``{name}.router.weight`` and so on."""

    def __init__(
        self,
        factory: ParameterFactory,
        name: str,
        moe: MoeSection,
        groups: ExpertGroups,
        mlp: MakeMlp = SwigluMlp,
        inside: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.weighs_inputs = moe.apply_probs_on_input
        self.router = Router(factory, f"{name}.router", moe, groups.micro)
        self.experts = Experts(factory, f"{name}.experts", groups.etp, inside)
        self.shared = (
            SharedExpert(factory, name, mlp) if moe.shared_expert_intermediate_size else None
        )

    @property
    def is_remade(self) -> bool:
        """True where backward recomputes the nonlinearities of all experts."""
        return self.experts.is_remade

    @is_remade.setter
    def is_remade(self, is_remade: bool) -> None:
        self.experts.is_remade = is_remade
        if self.shared is not None:
            self.shared.mlp.is_remade = is_remade

    def forward(self, x: Tensor, token_layout: TokenLayout | None = None) -> Tensor:
        """Map x [S/(cp*sp), B, D] to the same shape; without a layout every token counts."""
        # route
        own, token_ids, keys = self._own_tokens(x, token_layout)
        own, routing = self.router(own, token_ids, keys)
        if self.weighs_inputs:
            own, routing = weigh_inputs(own, routing)
        # all experts here: one autograd node, no dispatch
        if is_one_node(self.experts, routing, self.groups):
            y = self._to_stream(run_local_experts(own, routing, self.experts), x)
            return y if self.shared is None else y + self.shared.finish(self.shared.start(x), x)
        # dispatch | first half of the shared expert
        dispatch = dispatch_tokens(own, routing, self.groups)
        inner = x if self.shared is None else self.shared.start(x)
        # experts, then combine | second half of the shared expert
        dispatch.start_back(self.experts(*dispatch.arrive()))
        shared = None if self.shared is None else self.shared.finish(inner, x)
        y = self._to_stream(dispatch.result(), x)
        return y if shared is None else y + shared

    def _own_tokens(
        self, x: Tensor, token_layout: TokenLayout | None
    ) -> tuple[Tensor, TokenIds, Tensor | None]:
        """Return this rank's tokens [T, D], their ids and keys; a 1/tp share where tp ranks hold the same."""
        sp, token_ids = (
            self.groups.sp,
            None if token_layout is None else token_layout.token_ids,
        )
        keys = None if token_layout is None or token_layout.keys is None else token_layout.keys.own
        tokens = x.flatten(0, 1)
        if not sp.is_sequence_parallel and sp.tp.size > 1:
            tokens = scatter_rows(tokens, sp.tp)
        return (
            tokens,
            token_ids or plain_token_ids(x, self.groups.micro),
            None if keys is None else sp.share(keys.flatten()),
        )

    def _to_stream(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the rank's part of the residual stream, like x, from its own tokens' outputs."""
        tp = self.groups.sp.tp
        if self.weighs_inputs and self.router.moe.top_k > 1:
            y = y.unflatten(0, (-1, self.router.moe.top_k)).sum(1)
        if self.groups.sp.is_sequence_parallel or tp.size == 1:
            return y.view_as(x)
        return gather_rows(y, tp).view_as(x)


def weigh_inputs(x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    """Return tokens [T k, D], one for each choice, times its weight, and their routing with weights of 1."""
    weights = routing.weights.to(x.dtype)
    rows = (x[:, None] * weights[:, :, None]).flatten(0, 1)
    ones = torch.ones_like(routing.weights).view(-1, 1)
    return rows, replace(routing, experts=routing.experts.view(-1, 1), weights=ones)
