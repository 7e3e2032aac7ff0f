"""Feed-forward layers, with the F hidden features sharded over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn, sigmoid
from torch.nn.functional import gelu, relu, silu

from raymega.config.schema import ModelSection
from raymega.errors import ConfigError
from raymega.model.layers.clamped_swiglu import clamped_swiglu
from raymega.model.layers.fused_ops import bias_gelu, swiglu
from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.core.checkpointing import checkpoint_output, recompute_input
from raymega.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    ParameterFactory,
    RowParallelLinear,
)
from raymega.plugins import Plugin, call_plugin, find


class GeluMlp(nn.Module):
    """Feed-forward layer down(f(up(x))); f is GELU, in GPT-2 its tanh form, or ReLU^2.

    With ``is_remade`` backward recomputes f(up(x)).
    """

    is_remade = False

    def __init__(self, factory: ParameterFactory, name: str, activation: str = "gelu_tanh") -> None:
        super().__init__()
        self.inside = named_activation(activation)
        # When fused, the bias is added in the kernel of GELU's tanh form.
        self.is_fused = factory.is_fused and activation == "gelu_tanh"
        self.up = ColumnParallelLinear(factory, f"{name}.up", adds_bias=not self.is_fused)
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
        inside = self.inside if bias is None else partial(bias_gelu, bias=bias)
        if not self.is_remade:
            return self.down(inside(up))
        return recompute_input(
            self.down, checkpoint_output(inside, up, params=() if bias is None else (bias,))
        )


class SwigluMlp(nn.Module):
    """Feed-forward layer down(f(gate(x)) * up(x)); f is SiLU in Llama, GELU in Gemma (GeGLU).

    Gate and up are one GEMM. With ``is_remade`` backward recomputes f(gate(x)) * up(x). ``inside``
    computes it of both, side by side; None is SwiGLU.
    """

    is_remade = False

    def __init__(
        self, factory: ParameterFactory, name: str, inside: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.inside = inside or partial(swiglu, is_fused=factory.is_fused)
        self.gate_up = ColumnParallelLinear(factory, f"{name}.gate", f"{name}.up")
        self.down = RowParallelLinear(factory, f"{name}.down")

    def forward(self, x: Tensor, _token_layout: TokenLayout | None = None) -> Tensor:
        """Map x [S/sp, B, D] to the same shape, each token independently."""
        return self.finish(self.start(x))

    def start(self, x: Tensor) -> Tensor:
        """Map x [S/sp, B, D] to gate and up, [S, B, 2 F/tp], before the nonlinearity."""
        return recompute_input(self.gate_up, x)

    def finish(self, gate_up: Tensor) -> Tensor:
        """Apply the nonlinearity and the down-projection: [S, B, 2 F/tp] -> [S/sp, B, D]."""
        inside = self.inside
        return recompute_input(
            self.down, checkpoint_output(inside, gate_up) if self.is_remade else inside(gate_up)
        )


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU in its tanh form."""
    return gelu(x, approximate="tanh")


def make_gate(activation: str, model: ModelSection) -> Callable[[Tensor], Tensor] | None:
    """Return the map of gate and up, side by side, to what the down-projection reads; None for SwiGLU."""
    if activation == "silu":
        return None
    if activation == "clamped_silu":
        return partial(clamped_swiglu, alpha=model.swiglu_alpha, limit=model.swiglu_limit)
    return partial(gated, activation=named_activation(activation))


def gated(gate_up: Tensor, *, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return activation(gate) * up, [..., N], of gate_up [..., 2 N], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


def relu2(x: Tensor) -> Tensor:
    """Return ReLU(x)^2 (So et al. 2021)."""
    return relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), CLIP's approximation of GELU."""
    return x * sigmoid(1.702 * x)


def named_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the nonlinearity of a name; one of a plug-in that fails is named with its line."""
    row = find("activation", name)
    code: Callable[[Tensor], Tensor] = row.load()
    return partial(_named, row, code) if row.is_outside else code


def _named(row: Plugin, code: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y = call_plugin(row, lambda: code(x))
    if isinstance(y, Tensor) and y.shape == x.shape and y.dtype == x.dtype:
        return y
    raise ConfigError(
        fact=f"activation {row.name} returned {list(y.shape)} {y.dtype}"
        if isinstance(y, Tensor)
        else f"activation {row.name} returned {y!r:.60}",
        rule=f"it maps a tensor to one of its shape and dtype, {list(x.shape)} {x.dtype}",
        remedy=f"correct {row.target}",
    )


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
    "quick_gelu": quick_gelu,
    "silu": silu,
}
"""Nonlinearities by name."""
