"""BucketState: masters and optimizer state of the part of a bucket that a rank owns.

`optimizer.py` makes the update; `state_formats.py` defines the dtypes of state between steps.
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
from raymega.plan.memory.optimizer_state import AVERAGE, format_of, kinds_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Range of one parameter's elements in a bucket's owned part.

    Attributes:
        place: Place of the elements in the bucket and the parameter.
        within: Slice of the elements in a flat tensor of the owned part.
        param_state: Views that the update reads and writes; state only if stored in the masters' dtype.
        kept: State between steps, one storage a kind.
    """

    place: StatePlacement
    within: slice
    param_state: ParamState
    kept: tuple[StateStorage, ...]

    def open(self) -> ParamState:
        """Return the elements' views, with state converted to the masters' dtype."""
        if self.param_state.state:
            return self.param_state
        return replace(self.param_state, state=tuple(each.open() for each in self.kept))


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketState:
    """Tensors of the owned part of a bucket.

    ``weights``, ``gradient`` and ``master`` are flat and of one length. ``weights`` and ``master`` share
    memory if the compute dtype is float32 or wider. ``members`` are views of them, one for each range of
    a parameter. ``average`` is the moving average of the master; None where the job keeps none.
    """

    part: Range
    weights: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor
    members: tuple[Member, ...]
    average: torch.Tensor | None = None

    @property
    def memory(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that only an update reads, which may wait on the host."""
        if self.weights.dtype != self.master.dtype:
            yield self.master
        if self.average is not None:
            yield self.average
        for member in self.members:
            yield from (kept.memory for kept in member.kept)

    def blocks(self) -> Iterator[TensorBlock]:
        """Yield the masters of all members, then each kind of state of all members."""
        for member in self.members:
            yield from member.place.blocks("model", member.param_state.master)
        for number in range(max((len(member.kept) for member in self.members), default=0)):
            for member in self.members:
                for kept in member.kept[number : number + 1]:
                    yield from kept.blocks()
        yield from self._average_blocks()

    def _average_blocks(self) -> Iterator[TensorBlock]:
        if self.average is None:
            return
        for member in self.members:
            yield from member.place.blocks(AVERAGE, self.average[member.within])

    def follow_average(self, decay: float) -> None:
        """Move the average towards the masters, after their update."""
        if self.average is not None:
            self.average.lerp_(self.master, 1.0 - decay)

    def values(self, name: str) -> Iterator[TensorBlock]:
        """Yield masters and state as update ``name`` reads them: state in the masters' dtype."""
        for member in self.members:
            yield from member.place.blocks("model", member.param_state.master)
            kinds = kinds_of(name, member.param_state.param.spec.role)
            for kind, kept in zip(kinds, member.kept, strict=True):
                yield from member.place.blocks(kind, kept.open())
        yield from self._average_blocks()


def make_bucket_state(
    part: Range,
    weights: torch.Tensor,
    gradient: torch.Tensor,
    section: OptimizerSection,
) -> BucketState:
    """Return masters equal to the weights and zero state."""
    master, members = weights.to(gradient.dtype), []
    for extent in part.extents():
        within, role = extent.within(part.begin), extent.param.spec.role
        place = StatePlacement(part=part, extent=extent, dtype=master.dtype)
        form = format_of(section, role)
        kept = tuple(make_state_storage(form, kind, place) for kind in kinds_of(section.name, role))
        # State in the masters' dtype is updated in place; other formats are opened for each update.
        param_state = ParamState(
            param=extent.param,
            master=master[within],
            gradient=gradient[within],
            state=tuple(each.open() for each in kept) if form == "master" else (),
        )
        members.append(Member(place=place, within=within, param_state=param_state, kept=kept))
    return BucketState(
        part=part,
        weights=weights,
        gradient=gradient,
        master=master,
        members=tuple(members),
        average=master.clone() if section.ema_decay else None,
    )
