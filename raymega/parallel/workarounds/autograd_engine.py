"""autograd's engine from a given gradient, without the checks of shapes that may be symbols.

torch.autograd's own calls make those checks, and import sympy for them: 0.4 of the 1.8 s of a CPU that a new
process loads, and each that takes a lost rank's place is one. Shapes here are numbers. The engine itself would sum
a gradient that is larger than its output, so that is refused here. Megatron-LM calls it too (schedules.custom_backward).
Goes when torch.autograd.backward no longer imports sympy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from raymega.errors import Fault, InternalError


def add_gradients(output: Tensor | GradientEdge, gradient: Tensor) -> None:
    """Go back from ``output``, and add to the gradients of the leaves, as ``torch.autograd.backward`` does.

    Args:
        output: A tensor of a graph, or the edge that one came from which is gone.
        gradient: Of the output's shape, dtype and device.

    Raises:
        InternalError: The gradient's shape is not the output's.
        RuntimeError: The graph was gone through before.
    """
    _run(output, gradient, (), accumulate_grad=True)


def find_gradients(
    output: Tensor, inputs: Sequence[Tensor], gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of ``inputs``, None where the output does not depend on one; the leaves' are left alone.

    Args:
        output: A tensor of a graph.
        inputs: Tensors of that graph, at least one.
        gradient: Of the output's shape, dtype and device.

    Raises:
        InternalError, RuntimeError: As in :func:`add_gradients`.
    """
    return _run(output, gradient, tuple(inputs), accumulate_grad=False)


def _run(
    output: Tensor | GradientEdge,
    gradient: Tensor,
    inputs: tuple[Tensor, ...],
    *,
    accumulate_grad: bool,
) -> tuple[Tensor | None, ...]:
    shape = _shape(output)
    if gradient.shape != shape:
        raise InternalError(
            Fault(
                fact=f"a gradient has shape {tuple(gradient.shape)}, its output {tuple(shape)}",
                rule="both must be equal",
                remedy="give the gradient of this very output",
            )
        )
    return _engine_run_backward(
        (output,),
        (gradient,),
        keep_graph=False,
        create_graph=False,
        inputs=inputs,
        allow_unreachable=True,
        accumulate_grad=accumulate_grad,
    )


def _shape(output: Tensor | GradientEdge) -> torch.Size:
    if isinstance(output, Tensor):
        return output.shape
    return torch.Size(output.node._input_metadata[output.output_nr].shape)
