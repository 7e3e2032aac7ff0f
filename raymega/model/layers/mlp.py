"""Feed-forward layers, with the F hidden features sharded over the tensor-parallel ranks."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn.functional import gelu

from raymega.model.layers.fused_ops import bias_gelu, swiglu
from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.core.checkpointing import checkpoint_output, recompute_input
from raymega.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    ParameterFactory,
    RowParallelLinear,
)


class GeluMlp(nn.Module):
    """Feed-forward layer down(gelu(up(x))) with the tanh form of GELU, as in GPT-2.

    With ``is_remade`` backward recomputes gelu(up(x)).
    """

    is_remade = False

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        self.is_fused = factory.is_fused
        # When fused, the bias is added in the kernel of GELU.
        self.up = ColumnParallelLinear(factory, f"{name}.up", adds_bias=not factory.is_fused)
        self.down = RowParallelLinear(factory, f"{name}.down")

    def forward(self, x: Tensor, _token_layout: TokenLayout | None = None) -> Tensor:
        """Map x [S/sp, B, D] to the same shape, each token independently."""
        return self.finish(self.start(x))

    def start(self, x: Tensor) -> Tensor:
        """Map x [S/sp, B, D] to [S, B, F/tp], before the nonlinearity and, when fused, the bias."""
        return recompute_input(self.up, x)

    def finish(self, up: Tensor) -> Tensor:
        """Apply the nonlinearity and the down-projection: [S, B, F/tp] -> [S/sp, B, D]."""
        bias = self.up.bias if self.is_fused else None
        inside = gelu_tanh if bias is None else partial(bias_gelu, bias=bias)
        if not self.is_remade:
            return self.down(inside(up))
        return recompute_input(
            self.down, checkpoint_output(inside, up, params=() if bias is None else (bias,))
        )


class SwigluMlp(nn.Module):
    """Feed-forward layer down(silu(gate(x)) * up(x)), as in Llama; gate and up are one GEMM.

    With ``is_remade`` backward recomputes silu(gate(x)) * up(x).
    """

    is_remade = False

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        self.inside = partial(swiglu, is_fused=factory.is_fused)
        self.gate_up = ColumnParallelLinear(factory, f"{name}.gate", f"{name}.up")
        self.down = RowParallelLinear(factory, f"{name}.down")

    def forward(self, x: Tensor, _token_layout: TokenLayout | None = None) -> Tensor:
        """Map x [S/sp, B, D] to the same shape, each token independently."""
        return self.finish(self.start(x))

    def start(self, x: Tensor) -> Tensor:
        """Map x [S/sp, B, D] to gate and up, [S, B, 2 F/tp], before the nonlinearity."""
        return recompute_input(self.gate_up, x)

    def finish(self, gate_up: Tensor) -> Tensor:
        """Apply SwiGLU and the down-projection: [S, B, 2 F/tp] -> [S/sp, B, D]."""
        inside = self.inside
        return recompute_input(
            self.down, checkpoint_output(inside, gate_up) if self.is_remade else inside(gate_up)
        )


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU in its tanh form."""
    return gelu(x, approximate="tanh")
