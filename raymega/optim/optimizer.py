"""Optimizer: float32 (or float64) masters and state of what this rank owns, and their update.

What it owns is parallel.buckets'; the update is one of updates' or muon's. The gradient comes from
parallel.grad_buffer; the learning rate and the number of the step from whoever calls, so that
neither is kept twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from raymega.config.schema import ModelSection, OptimizerSection
from raymega.optim.bucket_state import BucketState, make_bucket_state
from raymega.optim.cpu_offload import HostState
from raymega.optim.update_chunk import UpdateChunk
from raymega.parallel.comm.process_groups import Groups
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.core.buckets import BucketTable, portions
from raymega.parallel.data_parallel.grad_buffer import GradBuffer, counted
from raymega.parallel.data_parallel.param_buffer import WeightBuffer
from raymega.parallel.data_parallel.state_tensors import StateTensor, TensorBlock
from raymega.plan.memory.optimizer_state import PORTION_ELEMENTS
from raymega.plan.tensor_table import GlobalTensor


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
        is_on_host: bool = False,
        log: CommLog | None = None,
    ) -> None:
        """``states`` are kept beside the masters and not updated here; the rest may lie on the host.

        ``log`` sees what ranks send each other for an update.
        """
        self._table, self._weights, self._section = table, weights, section
        self._states, self._is_on_host = states, is_on_host
        # torch reads and raises a count per slot. Views of one vector are set by one write.
        num_extents = sum(len(list(table.owned(bucket).extents())) for bucket in table.buckets)
        device = table.buckets[0].spans[0].param.device
        self._num_steps = torch.zeros(num_extents, device=device)
        counts = iter(self._num_steps)
        self._bucket_state = [
            make_bucket_state(
                table.owned(bucket),
                weights.owned(bucket),
                gradients.owned(bucket),
                section,
                counts,
            )
            for bucket in table.buckets
        ]
        # On all ranks the same buckets are updated together.
        self._update_chunks = list(
            portions(self._bucket_state, lambda each: each.master.numel(), PORTION_ELEMENTS)
        )
        log = log or CommLog()
        self._updates = [
            UpdateChunk(bucket_state, table, section, model, groups, log)
            for bucket_state in self._update_chunks
        ]
        # Views are made while there is memory.
        self._blocks = [
            block for bucket_state in self._bucket_state for block in bucket_state.blocks()
        ]
        on_host = self._update_chunks if is_on_host else []
        self._host = HostState(
            [[t for bucket_state in some for t in bucket_state.memory] for some in on_host], device
        )

    def step(self, *, lr: float, step: int, gradient_factor: float = 1.0) -> None:
        """Make the update number ``step``, counted from 1, with ``gradient_factor`` times the gradients.

        The buffer has the product afterwards.
        """
        self._weights.wait_for_all()
        self._num_steps.fill_(step - 1)
        divisor = self._divisor(gradient_factor)
        for number in self._host.turns() if self._is_on_host else range(len(self._update_chunks)):
            self._updates[number].update(lr=lr, divisor=divisor)
            self._round(self._update_chunks[number])
        self._weights.mark_updated()

    def _divisor(self, factor: float) -> torch.Tensor | None:
        """What the update divides gradients by on its way; wider ones than that has are scaled here."""
        if factor == 1.0:
            return None
        if self._table.dtype == torch.float32:
            return torch.tensor(1 / factor, device=self._num_steps.device)
        for bucket_state in self._bucket_state:
            bucket_state.gradient.mul_(factor)
        return None

    def blocks(self) -> Iterator[TensorBlock]:
        """What a checkpoint keeps; a load fills the values and then calls :meth:`sync_weights`."""
        for state in self._states:
            yield from state.blocks()
        for block in self._blocks:
            yield replace(block, values=self._host.on_host(block.values))

    def values(self) -> Iterator[TensorBlock]:
        """Masters and state, all in the masters' format, whatever the state is kept in."""
        for state in self._states:
            yield from state.blocks()
        with self._host.all_here():
            for bucket_state in self._bucket_state:
                for block in bucket_state.values(self._section.name):
                    # numpy forbids for ever to resize what it was shown.
                    yield replace(
                        block, values=block.values.clone() if self._is_on_host else block.values
                    )

    def shares(self) -> Iterator[tuple[GlobalTensor, torch.Tensor]]:
        """Masters that this rank counts, flat, by tensor: over all ranks each element once."""
        for bucket_state in self._bucket_state:
            part = self._table.share(bucket_state.part.bucket)
            master = self._host.on_host(bucket_state.master).to(bucket_state.weights.device)
            yield from counted(part, master, begin=bucket_state.part.begin)

    def sync_weights(self) -> None:
        """Round the masters into the weights that are not their own masters."""
        self._round(self._bucket_state)
        self._weights.mark_updated()

    @torch.no_grad()
    def _round(self, some: Sequence[BucketState]) -> None:
        for bucket_state in some:
            if bucket_state.weights.dtype != bucket_state.master.dtype:
                is_here = bucket_state.master.untyped_storage().nbytes() > 0
                bucket_state.weights.copy_(
                    bucket_state.master if is_here else self._host.on_host(bucket_state.master)
                )
