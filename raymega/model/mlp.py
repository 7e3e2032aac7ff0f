"""Feed-forward layers with the F hidden features cut over the tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from raymega.parallel.tensor import ColumnParallelLinear, ParameterFactory, RowParallelLinear


class GeluMlp(nn.Module):
    """down(gelu(up(x))), with the tanh form of GELU, as in GPT-2."""

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(factory, f"{name}.up")
        self.down = RowParallelLinear(factory, f"{name}.down")

    def forward(self, x: Tensor) -> Tensor:
        """x: [S/sp, B, D] -> [S/sp, B, D]."""
        return self.down(gelu(self.up(x), approximate="tanh"))


class SwigluMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), as in Llama; gate and up are one GEMM."""

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        self.gate_up = ColumnParallelLinear(factory, f"{name}.gate", f"{name}.up")
        self.down = RowParallelLinear(factory, f"{name}.down")

    def forward(self, x: Tensor) -> Tensor:
        """x: [S/sp, B, D] -> [S/sp, B, D]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu(gate) * up)
