"""Kernel fusion: torch.compile makes one kernel of several operations, where the job asks for it.

Only pure functions of tensors are compiled: never a collective, a hook or an autograd graph. So
compilation changes neither what is saved for backward, nor recomputation, nor deferred gradients.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Hashable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

logger = logging.getLogger(__name__)

# A process compiles a kernel or two at a time, so a pool of compiler processes in each rank does not pay.
# Kernels are not chosen by timing them: tensor-parallel ranks compute the same function of equal numbers,
# and different kernels would give different last bits.
OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    "compile_threads": 1, "deterministic": True,
}  # fmt: skip
Function = TypeVar("Function", bound=Callable[..., object])


def fused(function: Function, *, is_on: bool) -> Function:
    """Return ``function``, or with ``is_on`` its compiled form, which makes fewer passes over memory.

    Args:
        function: Function of tensors, numbers and booleans that returns tensors. It may overwrite an
            argument that needs no gradient, as its last operation.
        is_on: Compile at the first call, for the shapes of that call; other shapes later make the
            kernel dynamic.
    """
    return _compiled(function) if is_on else function


def can_fuse(device: torch.device) -> bool:
    """Return whether this machine can compile for ``device``; if not, log the reason once.

    Callers then run the functions uncompiled, with the same numbers up to rounding.
    """
    return not _obstacle(device)


class _Kernel(NamedTuple):
    """Function that torch compiled for arguments of some properties, and how to call it.

    Attributes:
        run: Function of tensors that launches the kernel and returns a sequence of tensors.
        order: Numbers of its arguments among those of the function.
        results: Numbers of what the function returns among its results.
        is_tuple: Whether the function returns a tuple.
    """

    run: Callable[..., Sequence[torch.Tensor]]
    order: tuple[int, ...]
    results: tuple[int, ...]
    is_tuple: bool


_Call = tuple[Callable[..., Any], Sequence[object], Sequence[object]]
"""A function that torch compiled, what it was given, and what it returned."""


class _Kernels:
    """Compiled forms of a function, found by the properties of its arguments.

    torch.compile finds them by checks of its own, in layers of Python that take longer than a small kernel. So
    it is called once for each set of properties, and what it had called is called from then on.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._compiled = torch.compile(function, backend=self._make)
        self._known: dict[Hashable, _Kernel] = {}
        # calls of what torch compiled, while one is to be noted: they would keep their tensors
        self._calls: list[_Call] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns."""
        if torch.is_grad_enabled():
            return self._compiled(*args, **kwargs)
        values = (*args, *kwargs.values()) if kwargs else args
        key = (*map(_property, values), *kwargs, torch.are_deterministic_algorithms_enabled())
        kernel = self._known.get(key)
        if kernel is None:
            return self._learn(key, values, args, kwargs)
        found = kernel.run(*[values[number] for number in kernel.order])
        if kernel.is_tuple:
            return tuple([found[number] for number in kernel.results])
        return found[kernel.results[0]]

    def _make(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Compile a graph: the function that torch.compile calls, which notes each call."""
        from torch._inductor.compile_fx import compile_fx

        made: Any = compile_fx(graph, inputs, config_patches=OPTIONS)

        def run(*given: object) -> Any:
            found = made(*given)
            if self._calls is not None:
                self._calls.append((made, given, found))
            return found

        return run

    def _learn(
        self, key: Hashable, values: Sequence[object], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Call through torch.compile, and note how to do without; sizes that vary are arguments, so none is noted."""
        calls: list[_Call] = []
        self._calls = calls
        try:
            output = self._compiled(*args, **kwargs)
        finally:
            self._calls = None
        # a tensor that is given twice is one argument of what was compiled
        tensors = [id(value) for value in values if isinstance(value, torch.Tensor)]
        if len(calls) == 1 and len({*tensors}) == len(tensors):
            ((run, given, found),) = calls
            outputs = output if isinstance(output, tuple) else (output,)
            order, results = _places(given, values), _places(outputs, found)
            if order is not None and results is not None:
                self._known[key] = _Kernel(run, order, results, isinstance(output, tuple))
        return output


def _property(value: object) -> Hashable:
    """Return what a kernel depends on: of a tensor its layout, format and device."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return cast(Hashable, value)


def _places(wanted: Sequence[object], among: Sequence[object]) -> tuple[int, ...] | None:
    """Return the place of each of the tensors ``wanted``, each once; None where one is not there, or is no tensor."""
    numbers = {id(value): number for number, value in enumerate(among)}
    places = [numbers.get(id(value)) for value in wanted if isinstance(value, torch.Tensor)]
    found = tuple(place for place in places if place is not None)
    return found if len({*found}) == len(wanted) else None


@cache
def _compiled(function: Function) -> Function:
    folder, kernels = _own_folder(), _Kernels(function)

    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        try:
            return kernels(*args, **kwargs)
        # A killed compiler may have left a truncated kernel, on which every later run would fail.
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    return cast(Function, call)


@cache
def _own_folder() -> Path:
    """Set torch's cache of compiled kernels to a folder of raymega's own, and return it.

    A killed compiler may leave a truncated file there, which torch takes for a whole one in every later
    process. So a failure empties the folder, and the next process compiles again.
    """
    default = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default)
    if folder.name != "raymega":  # a child process inherits the variable
        folder /= "raymega"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return folder


@cache
def _obstacle(device: torch.device) -> str:
    """Return the reason why nothing can be compiled for ``device``; '' if it can."""
    try:
        _compiled(_probe)(torch.zeros(8, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        logger.warning("kernels are not compiled but run one by one: %s", reason)
        return reason
    return ""


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + 1.0
