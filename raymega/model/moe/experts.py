"""Routed experts of one block that this rank holds, and the shared expert of all tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from raymega.model.layers.fused_ops import swiglu
from raymega.model.layers.mlp import GeluMlp, SwigluMlp, gelu_tanh
from raymega.model.moe.expert_adapter import make_expert_adapter
from raymega.model.moe.expert_bias import add_expert_bias
from raymega.model.moe.grouped_swiglu import gated_experts
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.checkpointing import checkpoint_output, recompute_input
from raymega.parallel.expert_parallel.fp8_grouped_gemm import expert_linear, expert_places
from raymega.parallel.expert_parallel.grouped_gemm import GroupSizes, group_sizes
from raymega.parallel.tensor_parallel.layers import ParameterFactory

MakeMlp = Callable[[ParameterFactory, str], GeluMlp | SwigluMlp]
"""Constructor of a dense feed-forward layer, from a factory and the name of the layer."""


class Experts(nn.Module):
    """Experts down(silu(gate(x)) * up(x)), or down(f(up(x))) without a gate, on sorted rows.

    The rank holds E/ep experts, F/etp features of each, so outputs are partial sums over etp. Gate and
    up are one tensor, [E/ep, 2 F/etp, D], and one grouped GEMM. With ``is_remade`` backward recomputes
    the nonlinearity. ``etp`` is the group with the other features of these experts, over which fp8
    scales are reduced. ``inside`` maps gate and up, or up, to what down reads; None is SwiGLU, or GELU. Biases are those
    that the table has.
    """

    is_remade = False

    def __init__(
        self,
        factory: ParameterFactory,
        name: str,
        etp: Group | None = None,
        inside: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.grad_queue = factory.grad_queue
        self.up_place, self.down_place = expert_places(factory.fp8, etp)
        gate_up = factory.make_if_any(f"{name}.gate.weight", f"{name}.up.weight")
        self.inside = inside or (gelu_tanh if gate_up is None else swiglu)
        self.up = factory.make(f"{name}.up.weight") if gate_up is None else gate_up
        self.down = factory.make(f"{name}.down.weight")
        # biases; of down's columns each etp rank has its own
        self.up_bias = factory.make_if_any(f"{name}.gate.bias", f"{name}.up.bias")
        self.down_bias = factory.make_if_any(f"{name}.down.bias")
        self.first_column = (
            self.down_bias.spec.pieces[0].box.offset[1] if self.down_bias is not None else 0
        )
        # adapters of gate and up, side by side, and of down
        names = ("up",) if gate_up is None else ("gate", "up")
        self.up_width = self.up.shape[1] // len(names)
        adapters = {n: make_expert_adapter(factory, f"{name}.{n}") for n in (*names, "down")}
        self.adapter_rank = max((each.rank for each in adapters.values() if each), default=0)
        self.down_adapter = adapters.pop("down")
        self.up_adapters = nn.ModuleDict({n: a for n, a in adapters.items() if a is not None})

    @property
    def can_be_one_node(self) -> bool:
        """True where both grouped GEMMs and SwiGLU may run as one autograd node."""
        has_adapters = len(self.up_adapters) > 0 or self.down_adapter is not None
        is_plain = self.inside is swiglu and not self.is_remade and self.up_place is None
        is_plain &= self.up_bias is None
        return is_plain and not has_adapters

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows [R, D], sorted by expert with ``counts`` [E/ep] int64, to outputs [R, D]."""
        grad_queue, width = self.grad_queue, self.down.shape[2]
        sizes = group_sizes(rows, counts, inner=width, adapter_rank=self.adapter_rank)
        # One node gains from a CPU's cache; on a GPU several nodes free memory earlier in backward.
        if self.can_be_one_node and rows.device.type == "cpu":
            return gated_experts(rows, self.up, self.down, sizes, grad_queue)
        up = self._with_adapters(
            rows, expert_linear(rows, self.up, sizes, grad_queue, self.up_place), sizes
        )
        if self.up_bias is not None:
            up = add_expert_bias(up, self.up_bias, counts)
        inside, place = self.inside, self.down_place
        inner = checkpoint_output(inside, up) if self.is_remade else inside(up)

        def finish(x: Tensor) -> Tensor:
            y = expert_linear(x, self.down, sizes, grad_queue, place)
            if self.down_adapter is not None:
                y = self.down_adapter(x, y, sizes, self.down)
            if self.down_bias is None:
                return y
            return add_expert_bias(y, self.down_bias, counts, first=self.first_column)

        return recompute_input(finish, inner)

    def _with_adapters(self, rows: Tensor, up: Tensor, sizes: GroupSizes) -> Tensor:
        """Add the adapters' outputs to gate and up, [R, 2 F], or to up, [R, F]."""
        if not len(self.up_adapters):
            return up
        parts = up.split(self.up_width, dim=1)
        names = ("gate", "up")[-len(parts) :]
        # rows of gate and up, which DoRA alone reads
        is_rescaled = any(each.magnitude is not None for each in self.up_adapters.values())
        weights = self.up.split(self.up_width, dim=1) if is_rescaled else [self.up] * len(parts)
        return torch.cat(
            [
                self.up_adapters[name](rows, part, sizes, weight)
                if name in self.up_adapters
                else part
                for name, part, weight in zip(names, parts, weights, strict=True)
            ],
            dim=1,
        )


class SharedExpert(nn.Module):
    """Dense feed-forward layer for all tokens, sharded over tp; with or without a gate.

    It runs in two halves: one overlaps with the dispatch of tokens, one with the combine.
    """

    def __init__(self, factory: ParameterFactory, name: str, mlp: MakeMlp) -> None:
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
