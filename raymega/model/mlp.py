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
        up = consume(self.up, x)
        return consume(self.down, produce(_gelu, up) if self.is_remade else _gelu(up))


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
        gate_up = consume(self.gate_up, x)
        return consume(self.down, produce(swiglu, gate_up) if self.is_remade else swiglu(gate_up))


def _gelu(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")
