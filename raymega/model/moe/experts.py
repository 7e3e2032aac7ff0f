"""Routed experts of one block that this rank holds, and the shared expert of all tokens."""

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
    """Experts down(silu(gate(x)) * up(x)), or down(gelu(up(x))) without a gate, on sorted rows.

    The rank holds E/ep experts, F/etp features of each, so outputs are partial sums over etp. Gate and
    up are one tensor, [E/ep, 2 F/etp, D], and one grouped GEMM. With ``is_remade`` backward recomputes
    the nonlinearity. ``etp`` is the group with the other features of these experts, over which fp8
    scales are reduced.
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
        """True where both grouped GEMMs and SwiGLU may run as one autograd node."""
        return self.inside is swiglu and not self.is_remade and self.up_place is None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows [R, D], sorted by expert with ``counts`` [E/ep] int64, to outputs [R, D]."""
        sizes, grad_queue = group_sizes(rows, counts, inner=self.down.shape[2]), self.grad_queue
        # One node gains from a CPU's cache; on a GPU several nodes free memory earlier in backward.
        if self.can_be_one_node and rows.device.type == "cpu":
            return gated_experts(rows, self.up, self.down, sizes, grad_queue)
        up = expert_linear(rows, self.up, sizes, grad_queue, self.up_place)
        inside, place = self.inside, self.down_place
        inner = checkpoint_output(inside, up) if self.is_remade else inside(up)
        return recompute_input(
            lambda x: expert_linear(x, self.down, sizes, grad_queue, place), inner
        )


class SharedExpert(nn.Module):
    """Dense feed-forward layer for all tokens, sharded over tp; with or without a gate.

    It runs in two halves: one overlaps with the dispatch of tokens, one with the combine.
    """

    def __init__(
        self, factory: ParameterFactory, name: str, mlp: type[GeluMlp] | type[SwigluMlp]
    ) -> None:
        super().__init__()
        self.mlp = mlp(factory, f"{name}.shared")
        self.gate = factory.make_if_any(f"{name}.shared_gate.weight")

    def start(self, x: Tensor) -> Tensor:
        """Run the first half: x [S/sp, B, D] -> [S, B, F/tp], or 2 F/tp with SwiGLU."""
        return self.mlp.start(x)

    def finish(self, inner: Tensor, x: Tensor) -> Tensor:
        """Run the second half: [S, B, F/tp] -> [S/sp, B, D], times the gate's sigmoid if there is one."""
        y = self.mlp.finish(inner)
        if self.gate is None:
            return y
        return y * torch.sigmoid(linear(x, self.gate))
