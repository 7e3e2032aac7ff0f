"""Notes of the memory that each operation reads and writes, for the race checker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.cuda_books.books import Books
from tests.cuda_books.trace import HOST_STREAM

NO_ACCESS = (
    "aten.empty",
    "aten.new_empty",
    "aten.detach",
    "aten.set_",
    "aten.resize",
    "aten.record_stream",
    "c10d",
)
"""Beginnings of the names of operations that touch no memory, or whose accesses the stand-in itself notes."""


@contextmanager
def noting(books: Books) -> Iterator[None]:
    """Note the memory of the operations of this thread, of autograd's, of helper threads, and of Inductor's."""
    with noting_with(lambda: MemoryNotes(books), partial(_note_compiled, books)):
        yield


@contextmanager
def noting_with(
    mode: Callable[[], TorchDispatchMode], note_compiled: Callable[[Any, Any, int], None]
) -> Iterator[None]:
    """Note operations by a dispatch mode, and kernels made by Inductor by a function.

    Args:
        mode: Maker of the mode that notes operations, one for each thread.
        note_compiled: Function of a kernel, its arguments and its stream.
    """
    submit, run = ThreadPoolExecutor.submit, CachingAutotuner.run

    def submit_noted(self: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        def noted() -> Any:
            # a mode belongs to a thread, and autograd alone hands it on
            with mode():
                return function(*args, **kwargs)

        return submit(self, noted)

    def run_noted(self: Any, *args: Any, stream: int, **kwargs: Any) -> Any:
        result = run(self, *args, stream=stream, **kwargs)
        note_compiled(self, args, stream)
        return result

    ThreadPoolExecutor.submit = submit_noted  # type: ignore[method-assign]
    CachingAutotuner.run = run_noted  # type: ignore[method-assign]
    try:
        with mode():
            yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
        CachingAutotuner.run = run  # type: ignore[method-assign]


class MemoryNotes(TorchDispatchMode):
    """Notes which memory of the device, or pinned for it, each operation reads and writes, on which stream.

    Left out are views, allocations, and operations that are made of others.
    """

    def __init__(self, books: Books) -> None:
        super().__init__()
        self._books = books

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: without it, what is compiled would run uncompiled under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then note it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not is_noted(func):
            return result
        # the schema says which arguments are written; `out` and in-place ones are among them
        arguments = [*zip(args, func._schema.arguments, strict=False)]
        arguments += [(kwargs[a.name], a) for a in func._schema.arguments if a.name in kwargs]
        written = [v for v, a in arguments if a.alias_info and a.alias_info.is_write]
        _note(self._books, str(func), (args, kwargs), (result, written))
        return result


def is_noted(func: Any) -> bool:
    """Return whether an operation touches memory by itself: no view, no allocation, not made of others."""
    is_made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    return not (is_made_of_others or func.is_view or str(func).startswith(NO_ACCESS))


def _note_compiled(books: Books, kernel: Any, args: Any, stream: int) -> None:
    """Note a kernel that Inductor made; the names of its arguments say what it reads and writes."""
    named = [*zip(kernel.fn.arg_names, args, strict=False)]
    reads = [v for name, v in named if not name.startswith("out_ptr")]
    writes = [v for name, v in named if name.startswith(("out_ptr", "in_out_ptr"))]
    writes += [v for name, v in named if name in kernel.mutated_arg_names]
    _note(books, kernel.fn.__name__, reads, writes, stream)


def _note(books: Books, what: str, read: Any, written: Any, stream: int | None = None) -> None:
    """Note an operation on its stream, or on the host one that touches pinned memory there."""
    reads, writes = _tensors(read), _tensors(written)
    is_on_device = any(tensor.is_cuda for tensor in (*reads, *writes))
    if not is_on_device:
        stream = HOST_STREAM
    elif stream is None:
        stream = torch.cuda.current_stream().cuda_stream
    # of host memory, the stand-in itself notes what a copy to or from the device touches
    spans = [
        ",".join(_span(t) for t in tensors if (t.is_cuda if is_on_device else t.is_pinned()))
        for tensors in (reads, writes)
    ]
    if any(spans):
        books.note(f"{stream:x}|{what}|{'|'.join(spans)}")


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.numel()]


def _span(tensor: torch.Tensor) -> str:
    return f"{tensor.data_ptr():x}:{_bytes_of(tensor)}"


def _bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to behind its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((n - 1) * abs(stride) for n, stride in steps) + 1) * tensor.element_size()
