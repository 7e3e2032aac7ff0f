"""Optimizer: float32 (or float64) masters and state of what this rank owns, and their update.

What it owns is parallel.buckets'; the update is one of updates.UPDATES. The gradient comes from
parallel.grad_buffer; the learning rate and the number of the step from whoever calls, so that
neither is kept twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from raymega.config.schema import OptimizerSection
from raymega.optim.param_groups import group_by_rates
from raymega.optim.updates import UPDATES, Slot
from raymega.parallel.blocks import Block, StateTensor, blocks_of
from raymega.parallel.buckets import BucketTable, Range
from raymega.parallel.grad_buffer import GradBuffer, counted
from raymega.parallel.parameter import ShardedParameter
from raymega.parallel.weight_buffer import WeightBuffer
from raymega.plan.levels import Level
from raymega.plan.tensors import GlobalTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """What is kept for the owned part of a bucket; all tensors are flat and alike.

    ``weights`` and ``master`` are the same memory where the compute dtype is precise enough.
    """

    part: Range
    weights: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor
    state: tuple[torch.Tensor, ...]


class Optimizer:
    """Masters, the update's state, and the update.

    Masters have the gradients' dtype. Weights of that dtype are their own masters: what a rank owns
    of them nobody else writes, and a gather only reads it. Weights of fewer bits have a copy, which
    the update moves and which is then rounded into them.
    """

    def __init__(
        self,
        table: BucketTable,
        gradients: GradBuffer,
        weights: WeightBuffer,
        section: OptimizerSection,
        *,
        states: Sequence[StateTensor] = (),
    ) -> None:
        """``states`` are kept beside the masters and not updated here."""
        self._table, self._weights, self._section = table, weights, section
        self._states = states
        self._update = UPDATES[section.name]
        self._held = [
            _hold(table.owned(bucket), weights.owned(bucket), gradients.owned(bucket), len(self._update.kinds))
            for bucket in table.buckets
        ]  # fmt: skip
        extents = [(held, extent) for held in self._held for extent in held.part.extents()]
        # torch reads and raises a count per slot. Views of one vector are set by one write.
        self._num_steps = torch.zeros(len(extents), device=self._held[0].master.device)
        self._slots = [
            _make_slot(held, extent.param, extent.within(held.part.begin), num_steps)
            for (held, extent), num_steps in zip(extents, self._num_steps, strict=True)
        ]
        self._groups = group_by_rates(self._slots, lambda slot: slot.param.spec.role, section)

    def step(self, *, lr: float, step: int, gradient_factor: float = 1.0) -> None:
        """Make the update number ``step``, counted from 1, with ``gradient_factor`` times the gradients.

        The buffer has the product afterwards.
        """
        self._weights.wait_for_all()
        self._num_steps.fill_(step - 1)
        divisor = self._divisor(gradient_factor)
        for rates, slots in self._groups.items():
            self._update.apply(
                slots,
                self._section,
                lr=lr * rates.lr_scale,
                weight_decay=rates.weight_decay,
                divisor=divisor,
            )
        self.sync_weights()

    def _divisor(self, factor: float) -> torch.Tensor | None:
        """What the update divides gradients by on its way; wider ones than that has are scaled here."""
        if factor == 1.0:
            return None
        if self._table.dtype == torch.float32:
            return torch.tensor(1 / factor, device=self._num_steps.device)
        for held in self._held:
            held.gradient.mul_(factor)
        return None

    def blocks(self) -> Iterator[Block]:
        """What a checkpoint keeps; a load fills the values and then calls :meth:`sync_weights`."""
        for state in self._states:
            yield from state.blocks()
        for held in self._held:
            is_replicated = held.part.bucket.level == Level.NONE
            tensors = zip(("model", *self._update.kinds), (held.master, *held.state), strict=True)
            for kind, values in tensors:
                yield from blocks_of(kind, held.part, values, is_replicated=is_replicated)

    def shares(self) -> Iterator[tuple[GlobalTensor, torch.Tensor]]:
        """Masters that this rank counts, flat, by tensor: over all ranks each element once."""
        for held in self._held:
            part = self._table.share(held.part.bucket)
            yield from counted(part, held.master, begin=held.part.begin)

    @torch.no_grad()
    def sync_weights(self) -> None:
        """Round the masters into the weights that are not their own masters."""
        for held in self._held:
            if held.weights.dtype != held.master.dtype:
                held.weights.copy_(held.master)
        self._weights.mark_updated()


def _hold(part: Range, weights: torch.Tensor, gradient: torch.Tensor, num_states: int) -> _Held:
    master = weights.to(gradient.dtype)
    return _Held(
        part=part,
        weights=weights,
        gradient=gradient,
        master=master,
        state=tuple(torch.zeros_like(master) for _ in range(num_states)),
    )


def _make_slot(held: _Held, param: ShardedParameter, place: slice, num_steps: torch.Tensor) -> Slot:
    return Slot(
        param=param,
        master=held.master[place],
        gradient=held.gradient[place],
        state=tuple(tensor[place] for tensor in held.state),
        num_steps=num_steps,
    )
