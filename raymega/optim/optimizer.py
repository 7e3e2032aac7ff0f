"""Optimizer: float32 (or float64) masters and state of the elements that this rank owns.

`parallel/core/buckets.py` defines which elements a rank owns; `updates.py` and `muon.py` hold the
updates. Learning rate and step number are arguments, so that neither is stored twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from raymega.config.schema import ModelSection, OptimizerSection, PluginsSection
from raymega.optim.bucket_state import BucketState, make_bucket_state
from raymega.optim.cpu_offload import HostState
from raymega.optim.update_chunk import UpdateChunk
from raymega.parallel.comm.process_groups import Groups
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.core.buckets import Bucket, BucketTable, cut_portions
from raymega.parallel.data_parallel.grad_buffer import GradBuffer, counted
from raymega.parallel.data_parallel.param_buffer import WeightBuffer
from raymega.parallel.data_parallel.state_tensors import (
    FrozenWeights,
    StateTensor,
    TensorBlock,
)
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.memory.optimizer_state import PORTION_ELEMENTS, format_of, update_of

SWAPPED = 2**20
"""Elements of masters and average that are exchanged at once."""


class Optimizer:
    """Masters, optimizer state and update of a rank's part of the model.

    Masters have the gradients' dtype. Weights of that dtype are their own masters: no other rank writes
    the part that a rank owns, and an all-gather only reads it. Narrower weights have a separate master,
    which is updated and then rounded into them.

    Attributes:
        holds_masters: Whether the blocks of a checkpoint hold the masters; False while the average is in their place.
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
        states: Sequence[StateTensor | FrozenWeights] = (),
        is_on_host: bool = False,
        log: CommLog | None = None,
        plugins: PluginsSection | None = None,
    ) -> None:
        """Allocate masters and state for all buckets of ``table``.

        ``states`` are tensors without gradients and frozen weights, saved with the masters but not updated.
        ``is_on_host`` offloads masters and state; ``log`` records the update's collectives; ``plugins`` has the
        options of an update that is a plug-in.
        """
        self._table, self._weights, self._section = table, weights, section
        self._states, self._is_on_host = states, is_on_host
        self.holds_masters = True
        # Portions of what the rank owns, equal on all ranks, as some updates communicate within one.
        owned = map(table.owned, table.buckets)
        can_cut = self._can_cut if is_on_host else _never
        portions = list(cut_portions(owned, PORTION_ELEMENTS, can_cut))
        device = table.device
        self._step = torch.zeros((), device=device)
        # Made one by one, so that an offloaded portion has left the device before the next is there.
        self._host = HostState(device)
        self._update_chunks: list[list[BucketState]] = []
        self._blocks: list[TensorBlock] = []
        for parts in portions:
            chunk = [
                make_bucket_state(
                    part, weights.owned_part(part), gradients.owned_part(part), section
                )
                for part in parts
            ]
            self._update_chunks.append(chunk)
            # The views of blocks are made before offloading frees the storages.
            self._blocks += [block for each in chunk for block in each.blocks()]
            if is_on_host:
                self._host.add([tensor for each in chunk for tensor in each.memory])
        self._bucket_state = [each for chunk in self._update_chunks for each in chunk]
        log = log or CommLog()
        self._updates = [
            UpdateChunk(
                bucket_state, table, section, model, groups, log, plugins or PluginsSection()
            )
            for bucket_state in self._update_chunks
        ]

    def _can_cut(self, bucket: Bucket) -> bool:
        """Return whether the update of any elements of a bucket reads those elements alone."""
        roles = {span.param.spec.role for span in bucket.spans}
        # Muon reads whole matrices, and the scales of 8-bit state whole blocks.
        return not any(
            update_of(self._section.name, role) == "muon"
            or format_of(self._section, role) == "8bit"
            for role in roles
        )

    def step(self, *, lr: float, step: int, gradient_factor: float = 1.0) -> None:
        """Make update ``step``, counted from 1, with ``gradient_factor`` times the gradients.

        Afterwards the gradient buffer holds that product.
        """
        self._weights.wait_for_all()
        self._step.fill_(step)
        divisor = self._divisor(gradient_factor)
        for number in self._host.turns() if self._is_on_host else range(len(self._update_chunks)):
            self._updates[number].update(step=self._step, lr=lr, divisor=divisor)
            with torch.no_grad():
                for bucket_state in self._update_chunks[number]:
                    bucket_state.follow_average(self._section.ema_decay)
            self._round(self._update_chunks[number])
        self._weights.mark_updated()

    def _divisor(self, factor: float) -> torch.Tensor | None:
        """Return the divisor that the fused update applies; scale float64 gradients here instead."""
        if factor == 1.0:
            return None
        # torch's grad_scale is a float32 scalar, too coarse for float64 gradients.
        if self._table.dtype == torch.float32:
            # A number in the kernel's arguments: the host waits for no copy.
            return torch.full((), 1 / factor, device=self._step.device)
        for bucket_state in self._bucket_state:
            bucket_state.gradient.mul_(factor)
        return None

    def blocks(self) -> Iterator[TensorBlock]:
        """Yield the blocks of a checkpoint; a load fills them, then calls :meth:`sync_weights`."""
        for state in self._states:
            yield from state.blocks()
        for block in self._blocks:
            yield replace(block, values=self._host.on_host(block.values))

    def values(self) -> Iterator[TensorBlock]:
        """Yield masters and state, all in the masters' dtype, whatever the state is stored in."""
        for state in self._states:
            yield from state.blocks()
        with self._host.all_here():
            for bucket_state in self._bucket_state:
                for block in bucket_state.values(self._section.name):
                    # A storage that numpy has viewed can never be resized, hence the copy.
                    yield replace(
                        block, values=block.values.clone() if self._is_on_host else block.values
                    )

    def shares(self) -> Iterator[tuple[GlobalTensor, torch.Tensor]]:
        """Yield the flat masters that this rank counts, by tensor; each element counts on one rank."""
        for bucket_state in self._bucket_state:
            part = self._table.share(bucket_state.part.bucket).common(bucket_state.part)
            master = self._host.on_host(bucket_state.master).to(bucket_state.weights.device)
            yield from counted(part, master, begin=bucket_state.part.begin)

    def sync_weights(self, *, is_start: bool = False) -> None:
        """Round masters into weights of a narrower dtype, and mark weights as changed.

        At a start from other weights (``is_start``) the moving average begins with them.
        """
        self._round(self._bucket_state)
        if is_start and self._section.ema_decay:
            with self._host.all_here(), torch.no_grad():
                for bucket_state in self._bucket_state:
                    bucket_state.follow_average(0.0)
        self._weights.mark_updated()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the weights be their moving average in the body, and afterwards what they were, bit for bit.

        All ranks call it together. Meanwhile the blocks of a checkpoint may hold the average in place of the masters.
        """
        # a gather of the last update still reads what changes here
        self._weights.wait_for_all()
        # an exchange that fails half-way leaves a mixture, which is the state of no step
        self.holds_masters = False
        self._exchange()
        self._weights.mark_updated()
        try:
            yield
            self._weights.wait_for_all()
        finally:  # of a body that failed too: what this rank holds may continue in memory
            self._exchange()
            self._round(self._bucket_state)
            self.holds_masters = True
        self._weights.mark_updated()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange masters and average where the weights are the masters; else let the weights be the average."""
        for bucket_state in self._bucket_state:
            assert bucket_state.average is not None, "the job keeps an average"
            average = self._host.on_host(bucket_state.average)
            if bucket_state.weights.dtype == bucket_state.master.dtype:
                _swap(bucket_state.master, average)
            else:
                _copy(bucket_state.weights, average)

    @torch.no_grad()
    def _round(self, some: Sequence[BucketState]) -> None:
        for bucket_state in some:
            if bucket_state.weights.dtype != bucket_state.master.dtype:
                is_here = bucket_state.master.untyped_storage().nbytes() > 0
                master = bucket_state.master if is_here else self._host.on_host(bucket_state.master)
                _copy(bucket_state.weights, master)


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the values of two flat tensors, which may lie on different devices, with little memory of its own."""
    for first, second in zip(one.split(SWAPPED), other.split(SWAPPED), strict=True):
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Round the values of a flat tensor into another; where they come from the host, with little memory beside."""
    if source.device == target.device:
        target.copy_(source)
        return
    # a copy that changes device and dtype has the whole of it once more
    for to, values in zip(target.split(SWAPPED), source.split(SWAPPED), strict=True):
        to.copy_(values)


def _never(_bucket: Bucket) -> bool:
    return False
