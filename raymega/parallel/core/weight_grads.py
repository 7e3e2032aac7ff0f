"""Gradients of weights: added to their sums at once, or put off until the schedule wants them.

Only products put theirs off, which are nearly all of the work; gradients of norms, biases and tables
are cheap and come at once. When to make what was put off is the schedule's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.workarounds.autograd_engine import add_gradients

SMALL_BYTES = 2**20
"""Below this a pass over a weight's gradient takes less time than a call into Python."""


class GradTerm(Protocol):
    """What one use of a weight adds to its gradient, not yet computed."""

    def compute(self) -> Tensor:
        """The term itself, of the weight's shape and format."""

    def add_to(self, total: Tensor, *, is_first: bool) -> None:
        """Add it to ``total`` of the weight's shape, in float32 or better; the first overwrites."""


class ComputedTerm(NamedTuple):
    """A term that ``function`` makes and no kernel adds where it belongs."""

    function: Callable[[], Tensor]

    def compute(self) -> Tensor:
        return self.function()

    def add_to(self, total: Tensor, *, is_first: bool) -> None:
        add(self.function(), total, is_first=is_first)


class DeferredGrad(NamedTuple):
    """A parameter, and a term of its gradient that is made when it is time."""

    param: Tensor
    term: GradTerm


class WeightGradQueue:
    """Where the linear layers of one stage leave terms of weight gradients; they are handed it.

    It is closed but while :meth:`collecting`, and layers of a closed one settle theirs at once.

    Attributes:
        stays_closed: Nothing of what runs forward now will be put off.
    """

    def __init__(self) -> None:
        self._owed: list[DeferredGrad] | None = None
        self.stays_closed = False

    @property
    def is_open(self) -> bool:
        """What is made now is put off."""
        return self._owed is not None

    def leaves_to_autograd(self, weight: Tensor) -> bool:
        """A layer may leave the gradient of ``weight`` to torch: it is small, and wanted at once.

        torch makes a new matrix and adds it, in C++; a function of ours adds it where it belongs,
        in one pass, and takes tens of microseconds of Python for that.
        """
        return self.stays_closed and self._owed is None and weight.nbytes < SMALL_BYTES

    @contextmanager
    def collecting(self) -> Iterator[list[DeferredGrad]]:
        """Let what backward reaches meanwhile be left in the list."""
        owed: list[DeferredGrad] = []
        self._owed = owed
        try:
            yield owed
        finally:
            self._owed = None

    def accumulate_or_defer(self, weight: Tensor, term: GradTerm) -> Tensor | None:
        """Return the gradient for autograd, or None if it was accumulated or deferred."""
        if self._owed is None:
            return accumulate_grad(weight, term)
        self._owed.append(DeferredGrad(weight, term))
        return None


def accumulate_grad(weight: Tensor, term: GradTerm) -> Tensor | None:
    """Add ``term`` to the weight's sum and return None; or return it, for autograd to add.

    A product adds to a large matrix in the pass that makes it. Autograd would get a new matrix, which
    is written, read and added. It does where nobody sums, or a hook wants to see the gradient.
    """
    if (
        not isinstance(weight, ShardedParameter)
        or weight.grad_sink is None
        or weight._backward_hooks
    ):
        return term.compute()
    total, is_first = weight.grad_sink.place(weight)
    term.add_to(total, is_first=is_first)
    return None


class _RowSums(NamedTuple):
    """Of a bias: grad [..., out], summed over all but the last dim."""

    grad: Tensor

    def compute(self) -> Tensor:
        return self.grad.flatten(0, -2).sum(0)

    def add_to(self, total: Tensor, *, is_first: bool) -> None:
        """total: [out]; a wider one gets the sum as it was made, which a narrow format may not hold."""
        add(self.grad.flatten(0, -2).sum(0, dtype=total.dtype), total, is_first=is_first)


def accumulate_bias_grad(bias: Tensor | None, grad: Tensor) -> Tensor | None:
    """:func:`accumulate_grad` for a linear layer's bias [out], or None, of whose output ``grad`` is the gradient."""
    return None if bias is None else accumulate_grad(bias, _RowSums(grad))


def add(made: Tensor, total: Tensor, *, is_first: bool) -> None:
    """For terms that no kernel adds where they belong."""
    if is_first:
        total.copy_(made)
    else:
        total.add_(made)


def run_deferred(owed: list[DeferredGrad]) -> None:
    """Settle debts now; hooks of the parameters see gradients like any other.

    As in any backward, a parameter that was used several times, as a head is that also predicts further
    ahead, gets the sum at once: its bucket may leave with it.
    """
    terms: dict[Tensor, list[GradTerm]] = {}
    for weight, term in owed:
        terms.setdefault(weight, []).append(term)
    owed.clear()
    for weight in list(terms):
        _accumulate_all(weight, terms.pop(weight))


def _accumulate_all(weight: Tensor, terms: list[GradTerm]) -> None:
    gradient: Tensor | None = None
    with torch.no_grad():
        for term in terms:
            made = accumulate_grad(weight, term)
            gradient = made if gradient is None or made is None else gradient + made
    if gradient is not None:
        add_gradients(weight, gradient)
    elif isinstance(weight, ShardedParameter) and weight.grad_sink is not None:
        weight.grad_sink.collect(weight)
