"""The experts of one block that this rank holds, and the shared expert that sees every token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from raymega.model.layers.fused_ops import swiglu
from raymega.model.layers.mlp import GeluMlp, SwigluMlp, gelu_tanh
from raymega.model.moe.grouped_swiglu import gated_experts
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.checkpointing import checkpoint_output, recompute_input
from raymega.parallel.expert_parallel.fp8_grouped_gemm import expert_linear, expert_places
from raymega.parallel.expert_parallel.grouped_gemm import group_sizes
from raymega.parallel.tensor_parallel.layers import ParameterFactory


class Experts(nn.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x))) without a gate, each row by its expert.

    Gate and up are one product: of each expert they lie one after the other, [E/ep, 2 F/etp, D].
    E/ep experts, of each F/etp features: what comes out are terms of a sum over etp. With
    ``is_remade`` backward makes what lies between the products again. ``etp`` are the ranks that have
    other features of these experts, which scales of products in fp8 ask.
    """

    is_remade = False

    def __init__(self, factory: ParameterFactory, name: str, etp: Group | None = None) -> None:
        super().__init__()
        self.grad_queue = factory.grad_queue
        self.up_place, self.down_place = expert_places(factory.fp8, etp)
        gate_up = factory.make_if_any(f"{name}.gate.weight", f"{name}.up.weight")
        self.inside: Callable[[Tensor], Tensor] = gelu_tanh if gate_up is None else swiglu
        self.up = factory.make(f"{name}.up.weight") if gate_up is None else gate_up
        self.down = factory.make(f"{name}.down.weight")

    @property
    def can_be_one_node(self) -> bool:
        """Both products and what lies between them may be a single node of autograd."""
        return self.inside is swiglu and not self.is_remade and self.up_place is None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: [R, D] by expert, counts: [E/ep] int64 -> [R, D]."""
        sizes, grad_queue = group_sizes(rows, counts, inner=self.down.shape[2]), self.grad_queue
        # Where no cache is won, several nodes let go of more on their way back.
        if self.can_be_one_node and rows.device.type == "cpu":
            return gated_experts(rows, self.up, self.down, sizes, grad_queue)
        up = expert_linear(rows, self.up, sizes, grad_queue, self.up_place)
        inside, place = self.inside, self.down_place
        inner = checkpoint_output(inside, up) if self.is_remade else inside(up)
        return recompute_input(
            lambda x: expert_linear(x, self.down, sizes, grad_queue, place), inner
        )


class SharedExpert(nn.Module):
    """A dense feed-forward layer beside the experts, cut over tp as any; with or without a gate.

    It comes in two halves, so that one runs while tokens travel to the experts and one while they
    come back.
    """

    def __init__(
        self, factory: ParameterFactory, name: str, mlp: type[GeluMlp] | type[SwigluMlp]
    ) -> None:
        super().__init__()
        self.mlp = mlp(factory, f"{name}.shared")
        self.gate = factory.make_if_any(f"{name}.shared_gate.weight")

    def start(self, x: Tensor) -> Tensor:
        """x: [S/sp, B, D] -> [S, B, F/tp or two of them]."""
        return self.mlp.start(x)

    def finish(self, inner: Tensor, x: Tensor) -> Tensor:
        """-> [S/sp, B, D]."""
        y = self.mlp.finish(inner)
        if self.gate is None:
            return y
        return y * torch.sigmoid(linear(x, self.gate))
