"""Gradients of weights: added to their sums at once, or deferred until the schedule asks for them.

Only matrix products are deferred, which are nearly all of the work. Gradients of norms, biases and
tables are cheap and added at once. The schedule decides when deferred ones are computed.
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
"""Bytes of a weight below which a pass over its gradient takes less time than a call into Python."""


class GradTerm(Protocol):
    """A term of a weight's gradient, from one use of the weight, not yet computed."""

    def compute(self) -> Tensor:
        """Return the term, in the weight's shape and format."""

    def add_to(self, total: Tensor, *, is_first: bool) -> None:
        """Add the term to ``total``, in the weight's shape and float32 or better; the first overwrites."""


class ComputedTerm(NamedTuple):
    """A term that ``function`` computes as a tensor of its own, which is then added."""

    function: Callable[[], Tensor]

    def compute(self) -> Tensor:
        return self.function()

    def add_to(self, total: Tensor, *, is_first: bool) -> None:
        add(self.function(), total, is_first=is_first)


class DeferredGrad(NamedTuple):
    """A parameter and a deferred term of its gradient."""

    param: Tensor
    term: GradTerm


class WeightGradQueue:
    """Queue in which the linear layers of one stage leave deferred terms of weight gradients.

    It is open only inside :meth:`collecting`. While it is closed, layers add their terms at once, or
    :meth:`hold` one back to compute it while a later layer waits for a message.

    Attributes:
        stays_closed: True where nothing that runs forward now will be deferred in its backward.
    """

    def __init__(self) -> None:
        self._owed: list[DeferredGrad] | None = None
        self._held: DeferredGrad | None = None
        self.stays_closed = False

    @property
    def is_open(self) -> bool:
        """True where terms are deferred now."""
        return self._owed is not None

    def leaves_to_autograd(self, weight: Tensor) -> bool:
        """Return whether a layer may leave the gradient of ``weight`` to torch: small, and not deferred.

        torch computes a new matrix and adds it, in C++. Our own function adds it in place, in one pass, but
        takes tens of microseconds of Python.
        """
        return self.stays_closed and self._owed is None and weight.nbytes < SMALL_BYTES

    @contextmanager
    def collecting(self) -> Iterator[list[DeferredGrad]]:
        """Open the queue: the backward inside defers its terms, which the yielded list receives."""
        owed: list[DeferredGrad] = []
        self._owed = owed
        try:
            yield owed
        finally:
            self._owed = None

    def accumulate_or_defer(self, weight: Tensor, term: GradTerm) -> Tensor | None:
        """Return the gradient for autograd, or None if it was accumulated or deferred, or is of a frozen weight."""
        if self._owed is None or not weight.requires_grad:
            return accumulate_grad(weight, term)
        self._owed.append(DeferredGrad(weight, term))
        return None

    def hold(self, weight: Tensor, term: GradTerm) -> Tensor | None:
        """Keep a term until :meth:`run_held`, and return None.

        While the queue is open, where a hook reads the gradient, and for a frozen weight, do
        :meth:`accumulate_or_defer` instead.
        """
        if self._owed is not None or weight._backward_hooks or not weight.requires_grad:
            return self.accumulate_or_defer(weight, term)
        self.run_held()
        self._held = DeferredGrad(weight, term)
        return None

    def run_held(self) -> None:
        """Compute the term that is held, if any: behind a message, and at the end of each backward."""
        held, self._held = self._held, None
        if held is not None:
            run_deferred([held])


def accumulate_grad(weight: Tensor, term: GradTerm) -> Tensor | None:
    """Add ``term`` to the weight's sum and return None, or return it for autograd to add; skip frozen weights.

    The product of a large matrix adds to the sum in the pass that computes it; autograd would write, read
    and add a new matrix. Autograd adds where the weight has no grad_sink, or a hook reads the gradient.
    """
    if not weight.requires_grad:
        return None
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
    """A term of a bias: grad [..., out], summed over all but the last dim."""

    grad: Tensor

    def compute(self) -> Tensor:
        return self.grad.flatten(0, -2).sum(0)

    def add_to(self, total: Tensor, *, is_first: bool) -> None:
        """Add the sum to ``total`` [out], in the format of ``total``: a narrow format would lose bits."""
        add(self.grad.flatten(0, -2).sum(0, dtype=total.dtype), total, is_first=is_first)


def accumulate_bias_grad(bias: Tensor | None, grad: Tensor) -> Tensor | None:
    """Accumulate the gradient of a linear layer's bias [out], or None, from ``grad`` of its output."""
    return None if bias is None else accumulate_grad(bias, _RowSums(grad))


def add(made: Tensor, total: Tensor, *, is_first: bool) -> None:
    """Add ``made`` to ``total``, or copy it there if it is the first term."""
    if is_first:
        total.copy_(made)
    else:
        total.add_(made)


def run_deferred(owed: list[DeferredGrad]) -> None:
    """Compute the deferred terms now; hooks of the parameters see the gradients as in any backward.

    A parameter that was used several times, such as a head that also predicts further ahead, gets all its
    terms in one go: its bucket may leave right after.
    """
    # group by weight; clear the list and pop, so that each weight's activations are freed on the way
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
    # autograd adds what was computed; the grad_sink only needs to learn that all terms are there
    if gradient is not None:
        add_gradients(weight, gradient)
    elif isinstance(weight, ShardedParameter) and weight.grad_sink is not None:
        weight.grad_sink.collect(weight)
