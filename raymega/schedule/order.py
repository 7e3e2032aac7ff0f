"""Writes one rank's order of work the way papers draw it: counts instead of micro-batch numbers.

It owns the counting; what comes when is each schedule's, and transfers are put in by transfers.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from raymega.schedule.instructions import Instruction, Op, Schedule
from raymega.schedule.simulate import Durations


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What a schedule is made for.

    Attributes:
        pp: Ranks of the pipeline.
        num_micro_batches: Of one step.
        chunks: Stages a rank.
        microbatch_group_size_per_vp_stage: Interleaved: micro-batches that pass a chunk before the next; 0 is ``pp``.
        max_in_flight_microbatches: zb_auto: most micro-batches that a rank may hold; 0 is ``pp``.
        wgrad_activation_fraction: zb_auto: how much of a micro-batch's activations its owed weight part keeps.
        times: zb_auto: what the search is for.
        is_paired: A forward and the backward beside it run together where they can, see transfers.
    """

    pp: int
    num_micro_batches: int
    chunks: int = 1
    microbatch_group_size_per_vp_stage: int = 0
    max_in_flight_microbatches: int = 0
    wgrad_activation_fraction: float = 1.0
    times: Durations = field(default_factory=Durations)
    is_paired: bool = False


def make_sizes(
    *,
    pp: int,
    chunks: int,
    num_micro_batches: int,
    microbatch_group_size_per_vp_stage: int | str = "pp",
    max_in_flight_microbatches: int | str = "pp",
    is_paired: bool = False,
) -> Sizes:
    """Sizes from a job file's values, where ``pp`` stands for that number."""
    return Sizes(
        pp=pp,
        chunks=chunks,
        num_micro_batches=num_micro_batches,
        microbatch_group_size_per_vp_stage=pp
        if microbatch_group_size_per_vp_stage == "pp"
        else int(microbatch_group_size_per_vp_stage),
        max_in_flight_microbatches=pp
        if max_in_flight_microbatches == "pp"
        else int(max_in_flight_microbatches),
        is_paired=is_paired,
    )


class Order:
    """The work of one rank under construction; each chunk takes micro-batches from 0 upwards.

    Asking for more than there are micro-batches adds nothing, so warm-up, steady phase and
    cool-down can be one loop.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self._num_micro_batches = num_micro_batches
        self._work: list[Instruction] = []
        self._done: Counter[tuple[Op, int]] = Counter()
        self._owed: deque[Instruction] = deque()

    @property
    def work(self) -> Schedule:
        """What was added so far."""
        return tuple(self._work)

    def forward(self, chunk: int = 0, *, times: int = 1) -> None:
        """The next micro-batches' forwards."""
        for _ in range(times):
            self._add(Op.FORWARD, chunk, counted_as=Op.FORWARD)

    def backward(self, chunk: int = 0, *, times: int = 1) -> None:
        """The next micro-batches' whole backwards."""
        for _ in range(times):
            self._add(Op.BACKWARD, chunk, counted_as=Op.BACKWARD)

    def backward_input(self, chunk: int = 0) -> None:
        """The first part of the next micro-batch's backward; its weight part is owed."""
        if self._add(Op.BACKWARD_INPUT, chunk, counted_as=Op.BACKWARD):
            last = self._work[-1]
            self._owed.append(
                Instruction(op=Op.BACKWARD_WEIGHT, micro_batch=last.micro_batch, chunk=chunk)
            )

    def backward_weight(self, *, times: int = 1) -> None:
        """The weight parts that are owed for longest."""
        for _ in range(min(times, len(self._owed))):
            self._work.append(self._owed.popleft())

    def backward_weight_of(self, chunk: int) -> None:
        """The weight part that ``chunk`` owes for longest."""
        owed = next((task for task in self._owed if task.chunk == chunk), None)
        if owed is not None:
            self._owed.remove(owed)
            self._work.append(owed)

    def settle(self) -> None:
        """All weight parts that are owed."""
        self.backward_weight(times=len(self._owed))

    def _add(self, op: Op, chunk: int, *, counted_as: Op) -> bool:
        micro_batch = self._done[counted_as, chunk]
        if micro_batch == self._num_micro_batches:
            return False
        self._done[counted_as, chunk] += 1
        self._work.append(Instruction(op=op, micro_batch=micro_batch, chunk=chunk))
        return True


def first_micro_batches(schedule: Schedule, num_micro_batches: int) -> Schedule:
    """The list without all later micro-batches; what was legal stays legal."""
    return tuple(task for task in schedule if task.micro_batch < num_micro_batches)
