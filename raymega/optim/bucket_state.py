"""BucketState: what a rank keeps of a bucket for its update, and the parts of it that are updated apart.

It moves nothing; the update is optimizer's, the format of what is kept state_formats'.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from raymega.config.schema import OptimizerSection
from raymega.optim.state_formats import (
    StatePlacement,
    StateStorage,
    make_state_storage,
)
from raymega.optim.updates import ParamState
from raymega.parallel.core.buckets import Range
from raymega.parallel.data_parallel.state_tensors import TensorBlock
from raymega.plan.memory.optimizer_state import MOST_KINDS, format_of, kinds_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Some elements of one parameter in a bucket's owned part.

    Attributes:
        place: Of what.
        within: Selects them in a flat tensor of the owned part.
        param_state: What updates them, with the state of formats that need no opening.
        kept: Their state between steps, a kind each.
    """

    place: StatePlacement
    within: slice
    param_state: ParamState
    kept: tuple[StateStorage, ...]

    def open(self) -> ParamState:
        """The slot with its state opened."""
        if self.param_state.state:
            return self.param_state
        return replace(self.param_state, state=tuple(each.open() for each in self.kept))


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketState:
    """What is kept for the owned part of a bucket.

    ``weights``, ``gradient`` and ``master`` are flat and alike; ``weights`` and ``master`` are the same
    memory where the compute dtype is precise enough. ``members`` are views of them, one an extent.
    """

    part: Range
    weights: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor
    members: tuple[Member, ...]

    @property
    def memory(self) -> Iterator[torch.Tensor]:
        """All that only an update reads."""
        if self.weights.dtype != self.master.dtype:
            yield self.master
        for member in self.members:
            yield from (kept.memory for kept in member.kept)

    def blocks(self) -> Iterator[TensorBlock]:
        """Masters, then state, each kind of all extents in turn."""
        for member in self.members:
            yield from member.place.blocks("model", member.param_state.master)
        for number in range(MOST_KINDS):
            for member in self.members:
                for kept in member.kept[number : number + 1]:
                    yield from kept.blocks()

    def values(self, name: str) -> Iterator[TensorBlock]:
        """The same as an update named ``name`` works on it: state in the masters' format."""
        for member in self.members:
            yield from member.place.blocks("model", member.param_state.master)
            kinds = kinds_of(name, member.param_state.param.spec.role)
            for kind, kept in zip(kinds, member.kept, strict=True):
                yield from member.place.blocks(kind, kept.open())


def make_bucket_state(
    part: Range,
    weights: torch.Tensor,
    gradient: torch.Tensor,
    section: OptimizerSection,
    counts: Iterator[torch.Tensor],
) -> BucketState:
    """Masters that begin as the weights, state of zeros; ``counts`` gives a scalar for each extent."""
    master, members = weights.to(gradient.dtype), []
    for extent in part.extents():
        within, role = extent.within(part.begin), extent.param.spec.role
        place = StatePlacement(part=part, extent=extent, dtype=master.dtype)
        form = format_of(section, role)
        kept = tuple(make_state_storage(form, kind, place) for kind in kinds_of(section.name, role))
        param_state = ParamState(
            param=extent.param,
            master=master[within],
            gradient=gradient[within],
            state=tuple(each.open() for each in kept) if form == "master" else (),
            num_steps=next(counts),
        )
        members.append(Member(place=place, within=within, param_state=param_state, kept=kept))
    return BucketState(
        part=part, weights=weights, gradient=gradient, master=master, members=tuple(members)
    )
