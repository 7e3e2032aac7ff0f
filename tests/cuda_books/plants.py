"""Mistakes that are planted into a rank on purpose, each of which must turn its book red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Plant:
    """A planted mistake.

    Attributes:
        layout: the layout that it is planted into.
        shows_in: "races", or the figure of the budget that it changes.
        make: makes the mistake, in the rank's process before it builds.
    """

    layout: str
    shows_in: str
    make: Callable[[], None]


def _forget_every_fifth_wait() -> None:
    from raymega.parallel.comm import collectives

    wait, seen = collectives.wait_on_stream, [0]

    def lame(work: Any, timeout_s: float) -> None:
        seen[0] += 1
        if seen[0] % 5:
            wait(work, timeout_s)

    collectives.wait_on_stream = lame


def _forget_wait_for_host_copy() -> None:
    import torch

    torch.cuda.Stream.wait_event = lambda *_: None  # type: ignore[method-assign]


def _free_what_a_copy_still_reads() -> None:
    import torch

    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]


def _fill_what_is_being_copied() -> None:
    from raymega.data.batch_copy import PackedBatches

    copy = PackedBatches.on_device

    def lame(self: PackedBatches, device: Any) -> Any:
        # the copy is queued and not waited for, as the loader leaves it
        found = copy(self, device)
        assert self.buffer is not None, "it runs on a GPU"
        self.buffer.zero_()
        return found

    PackedBatches.on_device = lame  # type: ignore[method-assign]


def _copy_a_list_in_forward() -> None:
    import torch

    from raymega.model.pipeline_stage import StageModule

    run = StageModule.run

    def copying(self: Any, micro_batch: Any, hidden: Any) -> Any:
        torch.tensor([0, 1], device="cuda")
        return run(self, micro_batch, hidden)

    StageModule.run = copying  # type: ignore[method-assign]


def _let_go_of_tensors_on_recorded_steps() -> None:
    from raymega.parallel.comm.trace import _GpuFlight

    begin = _GpuFlight.__init__

    def lame(self: Any, *args: Any) -> None:
        begin(self, *args)
        self._keeps_alive = None

    _GpuFlight.__init__ = lame  # type: ignore[method-assign]


def _read_back_in_each_instruction() -> None:
    import torch

    from raymega.pipeline import executor

    run = executor.Executor.run

    def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            torch.zeros(1, device="cuda").item()
        return run(self, *args, **kwargs)

    executor.Executor.run = reading  # type: ignore[method-assign]


def _multiply_blocks_that_still_travel() -> None:
    from raymega.parallel.comm.work import nothing_pending
    from raymega.parallel.tensor_parallel import layers, overlap

    # a block whose gather is said to be over already
    start = overlap.start_gather_blocks

    def lame(*args: Any) -> Any:
        whole, blocks = start(*args)
        return whole, [block._replace(gather=nothing_pending()) for block in blocks]

    overlap.start_gather_blocks = lame
    layers.start_gather_blocks = lame


def _open_a_communicator_nobody_uses() -> None:
    import torch
    import torch.distributed as dist

    from tests.cuda_books import rank

    open_alone = rank.open_alone

    def with_one_more(plan: Any, number: int, device: Any) -> Any:
        groups = open_alone(plan, number, device)
        # opened by a first message, as a group is lazy; no phase sends over it again
        group = dist.new_group(list(range(plan.grid.world_size)))
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        return groups

    rank.open_alone = with_one_more


def _update_before_a_save_is_copied() -> None:
    from raymega.checkpoint.save.host_copy import HostCopy

    HostCopy.fence = lambda _: None  # type: ignore[method-assign]


def _post_all_receives_at_once() -> None:
    from raymega.pipeline import executor

    run = executor.Executor.run

    def at_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        # all posts move to the first instruction
        everything = tuple(receive for posts in self._posts for receive in posts)
        self._posts = (everything, *[()] * (len(self._posts) - 1))
        return run(self, *args, **kwargs)

    executor.Executor.run = at_once  # type: ignore[method-assign]


def _take_more_memory_each_step() -> None:
    import torch

    from raymega.pipeline import executor

    run, kept = executor.Executor.run, []

    def hoarding(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept.append(torch.empty(2**26, device="cuda"))
        return run(self, *args, **kwargs)

    executor.Executor.run = hoarding  # type: ignore[method-assign]


def _hold_the_model_in_an_autograd_hook() -> None:
    from raymega.parallel.data_parallel import grad_buffer

    make = grad_buffer.GradBuffer.__init__

    def holding(self: Any, table: Any, *args: Any, **kwargs: Any) -> None:
        make(self, table, *args, **kwargs)
        # the hook's default argument refers to the buffer, and the buffer to all gradients
        for bucket in table.buckets:
            for param, _ in bucket.spans:
                param.register_post_accumulate_grad_hook(lambda _, held=self: None)

    grad_buffer.GradBuffer.__init__ = holding  # type: ignore[method-assign]


def _score_all_logits_at_once() -> None:
    from raymega.parallel.tensor_parallel import token_scores

    token_scores.MAX_PORTION = 2**40


PLANTS = {
    "a wait for a collective is missing": Plant("tp8 sp", "races", _forget_every_fifth_wait),
    "a product does not wait for its block": Plant(
        "tp8 sp", "races", _multiply_blocks_that_still_travel
    ),
    "a wait for a copy from host memory is missing": Plant(
        "offload activations", "races", _forget_wait_for_host_copy
    ),
    "a stream that reads a buffer is not recorded": Plant(
        "offload activations", "races", _free_what_a_copy_still_reads
    ),
    "a buffer is freed while NCCL reads it": Plant(
        "ep4 shared expert", "races", _let_go_of_tensors_on_recorded_steps
    ),
    "an update does not wait for a save's copy": Plant(
        "dp64 hybrid", "races", _update_before_a_save_is_copied
    ),
    "pinned memory is filled while a copy reads it": Plant(
        "one rank", "races", _fill_what_is_being_copied
    ),
    "the host reads the device in a loop": Plant(
        "one rank", "step.syncs", _read_back_in_each_instruction
    ),
    "a forward copies a list to the device": Plant(
        "tp4 pp2 dp2 1f1b", "step.syncs_in_passes", _copy_a_list_in_forward
    ),
    "memory is taken in each step": Plant("one rank", "step.mallocs", _take_more_memory_each_step),
    "a model outlives its attempt": Plant(
        "tp8 sp", "left_bytes", _hold_the_model_in_an_autograd_hook
    ),
    "a communicator is opened and not used": Plant(
        "tp8 sp", "communicators_unused", _open_a_communicator_nobody_uses
    ),
    "a receive is posted too early": Plant(
        "tp4 pp2 dp2 1f1b", "early_receives", _post_all_receives_at_once
    ),
    "all logits are scored at once": Plant(
        "recompute full", "scores.peak_bytes", _score_all_logits_at_once
    ),
}
