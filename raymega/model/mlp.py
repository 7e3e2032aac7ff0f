"""Feed-forward layers with the F hidden features cut over the tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import gelu

from raymega.model.kernels import swiglu
from raymega.parallel.recompute import consume, produce
from raymega.parallel.tensor import ColumnParallelLinear, ParameterFactory, RowParallelLinear


class GeluMlp(nn.Module):
    """down(gelu(up(x))), with the tanh form of GELU, as in GPT-2.

    With ``is_remade`` backward makes gelu(up(x)) again.
    """

    is_remade = False

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(factory, f"{name}.up")
        self.down = RowParallelLinear(factory, f"{name}.down")

    def forward(self, x: Tensor) -> Tensor:
        """x: [S/sp, B, D] -> [S/sp, B, D]."""
        return self.finish(self.start(x))

    def start(self, x: Tensor) -> Tensor:
        """x: [S/sp, B, D] -> [S, B, F/tp], before the nonlinearity."""
        return consume(self.up, x)

    def finish(self, up: Tensor) -> Tensor:
        """[S, B, F/tp] -> [S/sp, B, D]."""
        return consume(self.down, produce(gelu_tanh, up) if self.is_remade else gelu_tanh(up))


class SwigluMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), as in Llama; gate and up are one GEMM.

    With ``is_remade`` backward makes silu(gate(x)) * up(x) again.
    """

    is_remade = False

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        self.gate_up = ColumnParallelLinear(factory, f"{name}.gate", f"{name}.up")
        self.down = RowParallelLinear(factory, f"{name}.down")

    def forward(self, x: Tensor) -> Tensor:
        """x: [S/sp, B, D] -> [S/sp, B, D]."""
        return self.finish(self.start(x))

    def start(self, x: Tensor) -> Tensor:
        """x: [S/sp, B, D] -> [S, B, 2 F/tp], gate and up before the nonlinearity."""
        return consume(self.gate_up, x)

    def finish(self, gate_up: Tensor) -> Tensor:
        """[S, B, 2 F/tp] -> [S/sp, B, D]."""
        return consume(self.down, produce(swiglu, gate_up) if self.is_remade else swiglu(gate_up))


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form."""
    return gelu(x, approximate="tanh")
