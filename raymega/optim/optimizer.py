"""Optimizer: float32 (or float64) masters and state of what this rank owns, and their update.

What it owns is parallel.buckets'; the update is one of updates' or muon's. The gradient comes from
parallel.grad_buffer; the learning rate and the number of the step from whoever calls, so that
neither is kept twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raymega.config.schema import ModelSection, OptimizerSection
from raymega.optim.muon import begin_muon, end_muon, orthogonalise
from raymega.optim.param_groups import Rates, rates_of
from raymega.optim.updates import UPDATES, Slot
from raymega.parallel.blocks import Block, StateTensor, extent_blocks
from raymega.parallel.buckets import BucketTable, Extent, Range
from raymega.parallel.grad_buffer import GradBuffer, counted
from raymega.parallel.groups import Groups
from raymega.parallel.weight_buffer import WeightBuffer
from raymega.parallel.whole_matrices import WholeMatrices
from raymega.plan.levels import Level
from raymega.plan.optimizer_state import MOST_KINDS, kinds_of, update_of
from raymega.plan.tensors import GlobalTensor

PORTION_ELEMENTS = 2**24
"""Owned elements that are updated at once, so that what lasts for the update alone stays small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """What is kept for the owned part of a bucket.

    ``weights``, ``gradient`` and ``master`` are flat and alike; ``weights`` and ``master`` are the same
    memory where the compute dtype is precise enough. ``slots`` are views of them, one an extent.
    """

    part: Range
    weights: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor
    extents: tuple[Extent, ...]
    slots: tuple[Slot, ...]


class Optimizer:
    """Masters, the update's state, and the update.

    Masters have the gradients' dtype. Weights of that dtype are their own masters: what a rank owns
    of them nobody else writes, and a gather only reads it. Weights of fewer bits have a copy, which
    the update moves and which is then rounded into them.
    """

    def __init__(  # noqa: PLR0913  # build is the one place that calls it
        self,
        table: BucketTable,
        gradients: GradBuffer,
        weights: WeightBuffer,
        section: OptimizerSection,
        model: ModelSection,
        groups: Groups,
        *,
        states: Sequence[StateTensor] = (),
    ) -> None:
        """``states`` are kept beside the masters and not updated here."""
        self._table, self._weights, self._section = table, weights, section
        self._states = states
        # torch reads and raises a count per slot. Views of one vector are set by one write.
        num_extents = sum(len(list(table.owned(bucket).extents())) for bucket in table.buckets)
        device = table.buckets[0].spans[0].param.device
        self._num_steps = torch.zeros(num_extents, device=device)
        counts = iter(self._num_steps)
        self._held = [
            _hold(
                table.owned(bucket),
                weights.owned(bucket),
                gradients.owned(bucket),
                section.name,
                counts,
            )
            for bucket in table.buckets
        ]
        self._portions = [
            _Portion(held, section, model, _matrices_in(held, table, section, groups))
            for held in _portions(self._held)
        ]

    def step(self, *, lr: float, step: int, gradient_factor: float = 1.0) -> None:
        """Make the update number ``step``, counted from 1, with ``gradient_factor`` times the gradients.

        The buffer has the product afterwards.
        """
        self._weights.wait_for_all()
        self._num_steps.fill_(step - 1)
        divisor = self._divisor(gradient_factor)
        for portion in self._portions:
            portion.update(lr=lr, divisor=divisor)
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
            for kind, extent, values in self._values(held):
                yield from extent_blocks(
                    kind, held.part, extent, values, is_replicated=is_replicated
                )

    def _values(self, held: _Held) -> Iterator[tuple[str, Extent, torch.Tensor]]:
        """Masters, then state, each kind of all extents in turn."""
        for extent, slot in zip(held.extents, held.slots, strict=True):
            yield "model", extent, slot.master
        for number in range(MOST_KINDS):
            for extent, slot in zip(held.extents, held.slots, strict=True):
                if number < len(slot.state):
                    kinds = kinds_of(self._section.name, slot.param.spec.role)
                    yield kinds[number], extent, slot.state[number]

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


class _Portion:
    """Some buckets that are updated together."""

    def __init__(
        self,
        held: Sequence[_Held],
        section: OptimizerSection,
        model: ModelSection,
        matrices: WholeMatrices | None,
    ) -> None:
        self._held, self._section, self._matrices = held, section, matrices
        self._groups: dict[tuple[str, Rates], list[_Member]] = defaultdict(list)
        for each in held:
            for extent, slot in zip(each.extents, each.slots, strict=True):
                spec = slot.param.spec
                rates = rates_of(spec.pieces[0].tensor, section, model)  # fused ones are alike
                member = _Member(each.part.bucket.index, extent.within(each.part.begin), slot)
                self._groups[update_of(section.name, spec.role), rates].append(member)

    @torch.no_grad()
    def update(self, *, lr: float, divisor: torch.Tensor | None) -> None:
        for (name, rates), members in self._groups.items():
            if name in UPDATES:
                UPDATES[name](
                    [member.slot for member in members],
                    self._section,
                    lr=lr * rates.lr_scale,
                    weight_decay=rates.weight_decay,
                    divisor=divisor,
                )
        if self._matrices is not None:
            self._update_matrices(self._matrices, lr=lr, divisor=divisor)

    def _update_matrices(
        self, matrices: WholeMatrices, *, lr: float, divisor: torch.Tensor | None
    ) -> None:
        """Muon: each element's direction, made orthogonal where its matrix is whole, then taken."""
        groups = [
            (rates, members) for (name, rates), members in self._groups.items() if name == "muon"
        ]
        places = {member.bucket for _, members in groups for member in members}
        flats = {
            held.part.bucket.index: torch.empty_like(held.gradient)
            for held in self._held
            if held.part.bucket.index in places
        }
        for _, members in groups:
            begin_muon(*_with_directions(members, flats), self._section, divisor)
        matrices.transform(flats, lambda x: orthogonalise(x, self._section.newton_schulz_steps))
        for rates, members in groups:
            end_muon(
                *_with_directions(members, flats),
                lr=lr * rates.lr_scale,
                weight_decay=rates.weight_decay,
            )


class _Member(NamedTuple):
    """A slot, and where its bucket's owned part has it."""

    bucket: int
    place: slice
    slot: Slot


def _with_directions(
    members: Sequence[_Member], flats: Mapping[int, torch.Tensor]
) -> tuple[list[Slot], list[torch.Tensor]]:
    return [m.slot for m in members], [flats[m.bucket][m.place] for m in members]


def _hold(
    part: Range,
    weights: torch.Tensor,
    gradient: torch.Tensor,
    name: str,
    counts: Iterator[torch.Tensor],
) -> _Held:
    master, extents = weights.to(gradient.dtype), tuple(part.extents())
    slots = []
    for extent in extents:
        place = extent.within(part.begin)
        kinds = kinds_of(name, extent.param.spec.role)
        slots.append(
            Slot(
                param=extent.param,
                master=master[place],
                gradient=gradient[place],
                state=tuple(torch.zeros_like(master[place]) for _ in kinds),
                num_steps=next(counts),
            )
        )
    return _Held(
        part=part, weights=weights, gradient=gradient, master=master, extents=extents,
        slots=tuple(slots),
    )  # fmt: skip


def _portions(held: Sequence[_Held]) -> Iterator[list[_Held]]:
    """In order, a portion as soon as it has PORTION_ELEMENTS or more; on all ranks the same buckets."""
    portion: list[_Held] = []
    for each in held:
        portion.append(each)
        if sum(other.master.numel() for other in portion) >= PORTION_ELEMENTS:
            yield portion
            portion = []
    if portion:
        yield portion


def _matrices_in(
    held: Sequence[_Held], table: BucketTable, section: OptimizerSection, groups: Groups
) -> WholeMatrices | None:
    """Those that are updated whole; None when no bucket has any."""
    buckets = [
        bucket
        for bucket in (each.part.bucket for each in held)
        if any(update_of(section.name, param.spec.role) == "muon" for param, _ in bucket.spans)
    ]
    return WholeMatrices(table, buckets, groups) if buckets else None
