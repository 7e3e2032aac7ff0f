"""Writes one rank's order of work as papers draw it: counts instead of micro-batch numbers.

It owns the counting. The orders are in `raymega.schedule.schedules`; sends and receives are
inserted by `raymega.schedule.transfers`.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from raymega.schedule.instructions import Instruction, Op, Schedule
from raymega.schedule.simulate import Durations


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the pipeline and of the step that a schedule is made for.

    Attributes:
        pp: Number of pipeline ranks.
        num_micro_batches: Number of micro-batches per rank and step (m).
        chunks: Number of model chunks per rank (v), each one stage.
        microbatch_group_size_per_vp_stage: Interleaved 1F1B: number of micro-batches that pass a
            chunk before the next chunk begins; 0 means ``pp``.
        max_in_flight_microbatches: zb_auto: largest number of micro-batches that a rank may hold;
            0 means ``pp``.
        wgrad_activation_fraction: zb_auto: share of a micro-batch's activations that is held until
            its weight part has run; above 0 and at most 1.
        times: zb_auto: durations of the passes that the search optimises for.
        is_paired: True if a forward and the backward next to it run together where they can; see
            `raymega.schedule.transfers`.
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
    """Make the sizes from a job file's values, where the word ``pp`` stands for that number."""
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
    """Work of one rank under construction; each chunk takes micro-batches from 0 upwards.

    Work beyond the last micro-batch is ignored, so warm-up, steady state and cool-down can be one
    loop.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self._num_micro_batches = num_micro_batches
        self._work: list[Instruction] = []
        self._done: Counter[tuple[Op, int]] = Counter()
        self._owed: deque[Instruction] = deque()

    @property
    def work(self) -> Schedule:
        """Work added so far."""
        return tuple(self._work)

    def forward(self, chunk: int = 0, *, times: int = 1) -> None:
        """Add the forwards of the next ``times`` micro-batches."""
        for _ in range(times):
            self._add(Op.FORWARD, chunk, counted_as=Op.FORWARD)

    def backward(self, chunk: int = 0, *, times: int = 1) -> None:
        """Add the whole backwards of the next ``times`` micro-batches."""
        for _ in range(times):
            self._add(Op.BACKWARD, chunk, counted_as=Op.BACKWARD)

    def backward_input(self, chunk: int = 0) -> None:
        """Add the input part of the next micro-batch's backward; its weight part is then owed."""
        if self._add(Op.BACKWARD_INPUT, chunk, counted_as=Op.BACKWARD):
            last = self._work[-1]
            self._owed.append(
                Instruction(op=Op.BACKWARD_WEIGHT, micro_batch=last.micro_batch, chunk=chunk)
            )

    def backward_weight(self, *, times: int = 1) -> None:
        """Add the ``times`` weight parts that have been owed for longest."""
        for _ in range(min(times, len(self._owed))):
            self._work.append(self._owed.popleft())

    def backward_weight_of(self, chunk: int) -> None:
        """Add the weight part that ``chunk`` has owed for longest."""
        owed = next((task for task in self._owed if task.chunk == chunk), None)
        if owed is not None:
            self._owed.remove(owed)
            self._work.append(owed)

    def settle(self) -> None:
        """Add all weight parts that are owed."""
        self.backward_weight(times=len(self._owed))

    # Both parts of a split backward count as one backward of the chunk.
    def _add(self, op: Op, chunk: int, *, counted_as: Op) -> bool:
        micro_batch = self._done[counted_as, chunk]
        if micro_batch == self._num_micro_batches:
            return False
        self._done[counted_as, chunk] += 1
        self._work.append(Instruction(op=op, micro_batch=micro_batch, chunk=chunk))
        return True


def first_micro_batches(schedule: Schedule, num_micro_batches: int) -> Schedule:
    """Return the list's instructions for the first micro-batches; a legal list stays legal."""
    return tuple(task for task in schedule if task.micro_batch < num_micro_batches)
