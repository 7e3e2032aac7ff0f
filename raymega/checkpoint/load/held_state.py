"""The state that a process keeps when its attempt ends, so that the next one can continue from it.

A rank notes after each whole step that its masters and moments are those of that step. When other ranks are
lost, they stay where they are, and the ranks of the next attempt take them over, without a store. Ranks
that hold none, as they are new or a step behind, get them from a replica. `orchestrate/driver/replicas.py`
decides when every part of the state is still held.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from raymega.checkpoint.format.coverage import uncovered_cells
from raymega.checkpoint.load.shared_load import send_block
from raymega.errors import CheckpointError, Fault
from raymega.events import StepFinished
from raymega.parallel.comm.collectives import all_gather, broadcast
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.data_parallel.state_tensors import TensorBlock

log = logging.getLogger(__name__)

Scalars = dict[str, int | float | str]
NONE = -1
"""Step of a process that holds no state."""


@dataclass(slots=True)
class HeldState:
    """State after the last whole step of a rank.

    Attributes:
        blocks: Blocks of masters, moments and weights without a gradient.
        scalars: Scalars after that step, as in a checkpoint; empty while an update changes the blocks.
        report: Event of that step for rank 0 to report; None for the state that the attempt began with.
        is_finished: Whether what follows the step is done too: its evaluation and its saves.
    """

    blocks: list[TensorBlock] = field(default_factory=list)
    scalars: Scalars = field(default_factory=dict)
    report: StepFinished | None = None
    is_finished: bool = True

    @property
    def step(self) -> int:
        """Completed steps of the state; NONE where there is none."""
        return int(self.scalars["step"]) if self.scalars and self.blocks else NONE

    def begin(self, blocks: Iterable[TensorBlock], scalars: Scalars) -> None:
        """Hold ``blocks``, whose values are those of the state ``scalars``, in place of what was held."""
        self.blocks, self.scalars, self.report = list(blocks), scalars, None
        self.is_finished = True

    def changing(self) -> None:
        """Note that an update changes the blocks from now on."""
        self.scalars = {}

    def completed(self, report: StepFinished, scalars: Scalars) -> None:
        """Note that the blocks are those of the state ``scalars`` after a whole step."""
        self.scalars, self.report, self.is_finished = scalars, report, False

    @contextmanager
    def borrowed(self, is_back: Callable[[], bool]) -> Iterator[None]:
        """Hold nothing while the body has other values in the blocks, which it puts back even if it fails.

        Of a body that could not, as ``is_back`` tells, nothing is held.
        """
        scalars, self.scalars = self.scalars, {}
        try:
            yield
        finally:
            self.scalars = scalars if is_back() else {}

    def leave_device(self) -> None:
        """Move what is held on an accelerator to the host, as the next model is built before it is read."""
        if self.step == NONE:
            self.drop()
        self.blocks = [
            TensorBlock(
                kind=block.kind, tensor=block.tensor, box=block.box,
                values=block.values.detach().cpu(), is_primary=block.is_primary,
            )
            for block in self.blocks
        ]  # fmt: skip

    def drop(self) -> None:
        """Hold nothing."""
        self.blocks, self.scalars, self.report, self.is_finished = [], {}, None, True


def take_over(
    held: HeldState, blocks: Sequence[TensorBlock], replicas: Group, *, step: int
) -> tuple[Scalars, StepFinished | None]:
    """Fill ``blocks`` with the state after ``step``, from this process or from a replica that holds it.

    All ranks of ``replicas`` call it together.

    Args:
        held: State of this process, of any step or none.
        blocks: Blocks of the rank, to be filled.
        replicas: Ranks that keep the same blocks.
        step: Completed steps of the state.

    Returns:
        The scalars of the state, and what rank 0 reports of its last step, if this process knows.

    Raises:
        CheckpointError: No rank of ``replicas`` holds the whole state, or they keep other blocks.
    """
    has = held.step == step and fill(blocks, held.blocks)
    mine = torch.tensor([float(has), float(_shape_of(blocks))], dtype=torch.float64)
    device = blocks[0].values.device
    rows = all_gather(mine[None].to(device), replicas).cpu().tolist()
    owners = [place for place, (is_whole, _) in enumerate(rows) if is_whole]
    if not owners or len({shape for _, shape in rows}) > 1:
        raise CheckpointError(
            Fault(
                fact=f"of ranks {', '.join(map(str, replicas.ranks))} {len(owners)} hold step {step}",
                rule="a state that continues in memory is held by one replica at least, in equal blocks",
                remedy="none is needed: the run continues from a snapshot or a checkpoint",
            )
        )
    scalars = held.scalars if has else {}
    if len(owners) < replicas.size:
        scalars = _share(scalars, blocks, replicas, owners[0])
    return scalars, held.report if has else None


def fill(blocks: Sequence[TensorBlock], sources: Sequence[TensorBlock]) -> bool:
    """Copy into ``blocks`` what ``sources`` hold of them; return whether every element was there."""
    by_name: dict[str, list[TensorBlock]] = defaultdict(list)
    for source in sources:
        by_name[source.name].append(source)
    # check before anything is copied
    for block in blocks:
        here = by_name[block.name]
        if any(source.dtype != block.dtype for source in here):
            return False
        if any(uncovered_cells(block.box, [source.box for source in here])):
            return False
    # the same layout has equal boxes; a bucket that is cut elsewhere has pieces
    for block in blocks:
        for source in by_name[block.name]:
            common = block.box.intersect(source.box)
            if common is not None:
                block.at(common).copy_(source.at(common))
    return True


def _share(scalars: Scalars, blocks: Sequence[TensorBlock], replicas: Group, owner: int) -> Scalars:
    """Send the owner's values and scalars to the other replicas; return the scalars."""
    device = blocks[0].values.device
    for block in blocks:
        send_block(block, replicas, owner)
    # the scalars, whose length the others do not know
    text = torch.frombuffer(bytearray(json.dumps(scalars).encode()), dtype=torch.uint8).to(device)
    length = broadcast(torch.tensor([text.numel()], device=device), replicas, owner)
    if replicas.index != owner:
        text = torch.zeros(int(length), dtype=torch.uint8, device=device)
    shared: Scalars = json.loads(bytes(broadcast(text, replicas, owner).cpu().tolist()))
    log.info("took the state of step %s from a replica", shared["step"])
    return shared


def _shape_of(blocks: Sequence[TensorBlock]) -> int:
    """Return a number that is equal for equal names, boxes and formats."""
    return zlib.crc32(repr([(block.name, block.box, block.dtype) for block in blocks]).encode())


HELD = HeldState()
"""State that this process holds; a process has one world, and so one state."""
