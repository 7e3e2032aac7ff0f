"""Weight gradients that are put off: backward leaves them here, and they are made later.

Only linear layers put theirs off, which are nearly all of the work; gradients of norms, biases and
tables are cheap and come at once. When to make what was put off is the schedule's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OwedGradient:
    """A parameter, and how its gradient is made when it is time."""

    param: Tensor
    make: Callable[[], Tensor]


class Deferral:
    """Where the linear layers of one stage leave their weight gradients; they are handed it.

    It is closed but while :meth:`collecting`, and layers of a closed one make theirs at once.
    """

    def __init__(self) -> None:
        self._owed: list[OwedGradient] | None = None

    @property
    def is_open(self) -> bool:
        """What is made now is put off."""
        return self._owed is not None

    @contextmanager
    def collecting(self) -> Iterator[list[OwedGradient]]:
        """Let what backward reaches meanwhile be left in the list."""
        owed: list[OwedGradient] = []
        self._owed = owed
        try:
            yield owed
        finally:
            self._owed = None

    def settle_or_owe(self, param: Tensor, make: Callable[[], Tensor]) -> Tensor | None:
        """The gradient that ``make`` makes, or None when it was put off."""
        if self._owed is None:
            return make()
        self._owed.append(OwedGradient(param, make))
        return None


def make_owed(owed: list[OwedGradient]) -> None:
    """Make the gradients now; hooks of the parameters see them like any other.

    As in any backward, a parameter that was used several times, as a head is that also predicts further
    ahead, gets the sum at once: its bucket may leave with it.
    """
    while owed:
        param = owed[0].param
        same = [debt for debt in owed if debt.param is param]
        owed[:] = [debt for debt in owed if debt.param is not param]
        with torch.no_grad():
            gradient = same[0].make()
            for debt in same[1:]:
                gradient = gradient + debt.make()
        torch.autograd.backward(param, gradient)
