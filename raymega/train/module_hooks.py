"""Forward and backward hooks that show a callback the tensors of a stage during one pass.

The hooks change nothing and are removed afterwards. Users are `train/nan_locator.py` and
`train/train_statistics.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from raymega.model.pipeline_stage import StageModule
from raymega.model.stream_block import StreamBlock
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.workarounds.torch_private import is_in_backward

Kind = Literal["input", "output", "gradient", "weight gradient"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorObservation:
    """Tensor that a hook saw, with its place in the model and in the batch.

    Attributes:
        kind: Place of the tensor; ``gradient`` is the gradient of the module's output.
        name: Name of the module or parameter, such as ``layers.3.attention.qkv``; empty for the
            whole stage.
        chunk: Index of the rank's model chunk.
        micro_batch: Number of the micro-batch within the pass.
        samples: Global samples of the micro-batch, [B] or one a token; -1 for padding.
        tensor: Values, detached from autograd.
    """

    kind: Kind
    name: str
    chunk: int
    micro_batch: int
    samples: Tensor
    tensor: Tensor


See = Callable[[TensorObservation], None]


@contextmanager
def hook_modules(
    modules: Sequence[StageModule], see: See, *, only: type[nn.Module] | None = None
) -> Iterator[None]:
    """Call ``see`` with each tensor that flows through ``modules`` in the body.

    With ``only``, these are the outputs of modules of that type and the gradients of these outputs.
    Without it, every module and the whole stage show their inputs and parameter gradients too.
    Forward passes that recomputation repeats are not shown again, nor are those without training.
    """
    with ExitStack() as stack:
        for chunk, module in enumerate(modules):
            for handle in _Tap(module, chunk, see).attach(only):
                stack.callback(handle.remove)
        yield


class _Tap:
    """Hooks of one stage module; a chunk's forwards come in the order of micro-batches."""

    def __init__(self, module: StageModule, chunk: int, see: See) -> None:
        self._module, self._chunk, self._see = module, chunk, see
        self._micro_batch = -1
        self._samples = torch.empty(0)
        self._in_backward = (self._micro_batch, self._samples)

    def attach(self, only: type[nn.Module] | None) -> Iterator[RemovableHandle]:
        # First, so that the micro-batch is counted before any other hook looks at it.
        yield self._module.register_forward_pre_hook(self._begin)
        for name, module in self._module.named_modules():
            if only is None or isinstance(module, only):
                yield module.register_forward_hook(self._on_output(name))
            if only is None:
                yield module.register_forward_pre_hook(self._on_input(name))
        if only is None:
            for param in self._module.parameters():
                if isinstance(param, ShardedParameter) and param.requires_grad:
                    yield param.register_hook(self._on_weight_gradient(param.spec.name))

    def _begin(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note the next micro-batch; ``args`` are (tokens, labels, mask, hidden, samples, rows)."""
        self._micro_batch += 1
        self._samples = args[4]

    def _on_input(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def look(_module: nn.Module, args: tuple[Any, ...]) -> None:
            for tensor in args:
                # A forward inside a backward is recomputation: shown before.
                if self._is_first_pass() and isinstance(tensor, Tensor):
                    self._show("input", name, tensor)

        return look

    def _on_output(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, _args: Any, output: Any) -> None:
            # of two streams a block passes one on
            output = module.changed(output) if isinstance(module, StreamBlock) else output
            if not self._is_first_pass() or not isinstance(output, Tensor):
                return
            self._show("output", name, output)
            if output.requires_grad:
                output.register_hook(self._on_gradient(name))

        return look

    def _is_first_pass(self) -> bool:
        # The pass of a preference loss that computes its reference is no training.
        return self._module.training and not is_in_backward()

    def _on_gradient(self, name: str) -> Callable[[Tensor], None]:
        # Bound at forward: backward of this output runs when later micro-batches have begun.
        micro_batch, samples = self._micro_batch, self._samples

        def look(gradient: Tensor) -> None:
            self._in_backward = (micro_batch, samples)
            self._show_gradient("gradient", name, gradient)

        return look

    def _on_weight_gradient(self, name: str) -> Callable[[Tensor], None]:
        # The stage's own output gets its gradient first, so _in_backward is set by now.
        return lambda gradient: self._show_gradient("weight gradient", name, gradient)

    def _show_gradient(self, kind: Kind, name: str, gradient: Tensor) -> None:
        micro_batch, samples = self._in_backward
        self._see(
            TensorObservation(
                kind=kind, name=name, chunk=self._chunk, micro_batch=micro_batch, samples=samples,
                tensor=gradient,
            )
        )  # fmt: skip

    def _show(self, kind: Kind, name: str, tensor: Tensor) -> None:
        self._see(
            TensorObservation(
                kind=kind, name=name, chunk=self._chunk, micro_batch=self._micro_batch,
                samples=self._samples, tensor=tensor.detach(),
            )
        )  # fmt: skip
