"""Direct calls of autograd's engine from a given gradient, without the checks for symbolic shapes.

torch.autograd's functions make those checks and import sympy for them: 0.4 s of the 1.8 s of CPU time in which
a new process loads. A replacement for a lost rank is such a process. Shapes here are plain numbers. The engine
itself would sum a gradient that is larger than its output, so `_run` refuses that. Megatron-LM calls the engine
too (schedules.custom_backward). Goes when torch.autograd.backward no longer imports sympy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from raymega.errors import Fault, InternalError


def add_gradients(output: Tensor | GradientEdge, gradient: Tensor) -> None:
    """Run backward from ``output`` and add to the leaves' gradients, as ``torch.autograd.backward`` does.

    Args:
        output: Tensor of a graph, or the graph edge of a tensor that was freed.
        gradient: Gradient of the output, of its shape, dtype and device.

    Raises:
        InternalError: The gradient's shape differs from the output's.
        RuntimeError: An earlier backward has freed the graph.
    """
    _run(output, gradient, (), accumulate_grad=True)


def find_gradients(
    output: Tensor, inputs: Sequence[Tensor], gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``inputs``, None where the output does not depend on one.

    ``grad`` of the leaves is not changed.

    Args:
        output: Tensor of a graph.
        inputs: Tensors of that graph, at least one.
        gradient: Gradient of the output, of its shape, dtype and device.

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
    # The tensor of an edge may be freed; the node still knows the shape of its gradient.
    return torch.Size(output.node._input_metadata[output.output_nr].shape)
