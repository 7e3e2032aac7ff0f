"""Notes of what each operation costs: FLOPs of products and attention, bytes of all else.

A note follows the launches of its operation in the trace, as ``cost|kind|name|bytes|flops``. Before a
collective stands ``group|name|ranks|ranks on this node``, and before each part of a step ``phase|name``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raymega.parallel.comm import collectives
from raymega.train import step as train_step
from tests.cuda_books.books import Books
from tests.cuda_books.memory_notes import is_noted, noting_with

DEVICES_PER_NODE = 8
PRODUCTS = {
    "mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_scaled_mm": 0, "_grouped_mm": 0, "_scaled_grouped_mm": 0,
}  # fmt: skip
"""Products by name, with the place of their left matrix; the right one is the next argument."""
ATTENTION = {
    "_flash_attention_forward": 0, "_scaled_dot_product_flash_attention": 0,
    "_flash_attention_backward": 1, "_scaled_dot_product_flash_attention_backward": 1,
}  # fmt: skip
"""Kernels of attention by name, with the place of the queries; the keys are the next argument."""
BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward over those of its forward: five products for two."""
OVERWRITTEN = ("copy_", "fill_", "zero_")
"""Operations that write their first argument without reading it."""
SELECTED = ("embedding", "gather", "index", "index_select")
"""Operations that read as much of their first argument as they return."""
ADDED_AT = ("index_add_", "index_copy_", "index_put_", "scatter_add_", "scatter_")
"""Operations that touch no more of their first argument than they are given values."""


@contextmanager
def noting_costs(books: Books) -> Iterator[None]:
    """Note the costs of all operations, the groups of collectives, and the parts of a step."""
    start, run = collectives._start, train_step.forward_backward

    def start_noted(operation: str, tensor: Any, group: Any, *args: Any, **options: Any) -> Any:
        # ranks of one node talk over NVLink, others over the network
        here = group.ranks[group.index] // DEVICES_PER_NODE
        beside = sum(rank // DEVICES_PER_NODE == here for rank in group.ranks)
        books.note(f"group|{group.name}|{group.size}|{beside}")
        return start(operation, tensor, group, *args, **options)

    def run_noted(*args: Any, **options: Any) -> Any:
        books.note("phase|passes")
        try:
            return run(*args, **options)
        finally:
            books.note("phase|update")

    collectives._start, train_step.forward_backward = start_noted, run_noted
    try:
        with noting_with(lambda: CostNotes(books), lambda *seen: _note_compiled(books, *seen)):
            yield
    finally:
        collectives._start, train_step.forward_backward = start, run


class CostNotes(TorchDispatchMode):
    """Notes the cost of each operation on the device, behind its launches."""

    def __init__(self, books: Books) -> None:
        super().__init__()
        self._books = books

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: without it, what is compiled would run uncompiled under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then note its cost."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_noted(func) and any(t.is_cuda for t in _tensors((args, kwargs, result))):
            self._books.note(_cost_of(func, args, kwargs, result))
        return result


def _cost_of(func: Any, args: Any, kwargs: Any, result: Any) -> str:
    """Return the note of an operation."""
    # FLOPs count for products and attention; memory's rate bounds all else
    name = func._schema.name.split("::")[1]
    moved = _bytes_moved(func, name, args, kwargs, result)
    if name in PRODUCTS:
        left, right = args[PRODUCTS[name] : PRODUCTS[name] + 2]
        kind = "wide product" if left.dtype == torch.float32 else "product"
        return f"cost|{kind}|{name}|{moved}|{2 * left.numel() * right.shape[-1]}"
    if name in ATTENTION:
        queries, keys = args[ATTENTION[name] : ATTENTION[name] + 2]
        # positions are dim 2 of the public operation, dim 1 of the kernel itself
        positions = keys.shape[2 if name.startswith("_scaled") else 1]
        flops = 4 * queries.numel() * positions / 2
        if ATTENTION[name]:
            return f"cost|attention backward|{name}|{moved}|{BACKWARD_ATTENTION * flops:.0f}"
        return f"cost|attention forward|{name}|{moved}|{flops:.0f}"
    return f"cost|element-wise|{name}|{moved}|0"


def _bytes_moved(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    # operations that touch a part of their first argument
    first = _tensors(args[:1])
    if name in ADDED_AT:
        return 2 * _bytes(_tensors((args[1:], kwargs)))
    if name in SELECTED:
        return 2 * _bytes(_tensors(result)) + _bytes(_tensors((args[1:], kwargs)))
    # what is overwritten is not read: targets of copies, and those given as ``out``
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    written = [
        given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write
    ]
    unread = [given[a.name] for a in func._schema.arguments if a.is_out and a.name in given]
    unread += first if name in OVERWRITTEN else []
    known = {t.data_ptr() for t in _tensors(unread)}
    reads = [t for t in _tensors((args, kwargs)) if t.data_ptr() not in known]
    # a result in an argument's memory is written once, and counted where it is written
    aliases = {t.data_ptr() for t in _tensors((args, kwargs))}
    made = [t for t in _tensors(result) if t.data_ptr() not in aliases]
    return _bytes(reads) + _bytes(made) + _bytes(_tensors(written))


def _note_compiled(books: Books, kernel: Any, args: Any, _stream: int) -> None:
    """Note a kernel that Inductor made; the names of its arguments say what it reads and writes."""
    total = 0
    for name, value in zip(kernel.fn.arg_names, args, strict=False):
        is_both = name.startswith("in_out_ptr") or name in kernel.mutated_arg_names
        total += (1 + is_both) * _bytes(_tensors(value))
    books.note(f"cost|element-wise|{kernel.fn.__name__}|{total}|0")


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.numel()]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' elements, each expanded element once, each tensor once."""
    seen: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        if not tensor.is_cuda:
            continue
        count = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            count *= size if stride else 1
        seen[tensor.data_ptr(), count] = count * tensor.element_size()
    return sum(seen.values())
