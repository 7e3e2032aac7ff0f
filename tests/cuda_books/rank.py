"""Rank 0 of a layout on the device that executes nothing: ``python -m tests.cuda_books.rank NAME FOLDER``.

The process must have the stand-in loaded before torch: run.py starts it so. What the device would compute is zero, so
three totals of a step and the experts' row counts are put in by hand after they have been read; all else is
raymega's and torch's own code. Prints the book as one line of JSON, and leaves the traces in FOLDER.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import raymega.parallel.expert_parallel.dispatcher as dispatcher
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.config.load import parse_mapping
from raymega.data import prefetch
from raymega.messages import Requests
from raymega.parallel.comm import world
from raymega.parallel.comm.nccl_warmup import open_communicators
from raymega.parallel.comm.process_groups import Groups, groups_of_plan
from raymega.plan.host_memory import host_memory
from raymega.plan.memory.state_bytes import rank_state
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.planner.cost.peak_memory import pipeline_memory
from raymega.train import step as train_step
from raymega.train.build import TrainingComponents, build_parts
from raymega.train.environment import prepare_process
from raymega.train.save_schedule import SaveScheduler
from raymega.train.state import TrainState, first_state
from tests.cuda_books.layouts import job_of
from tests.cuda_books.plants import PLANTS
from tests.cuda_books.trace import HOST
from tests.support.memory_store import MemoryStore

COUNTERS = (
    "launches",
    "syncs",
    "collectives",
    "mallocs",
    "pinned_bytes",
    "communicators",
    "used_bytes",
)
RANK = 0


class Books:
    """The stand-in's counters and trace, by way of the library that is loaded into this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.books_count.restype = ctypes.c_ulonglong

    def counts(self) -> dict[str, int]:
        """Return all counters since the process began."""
        return {name: int(self._library.books_count(n)) for n, name in enumerate(COUNTERS)}

    def note(self, text: str) -> None:
        """Write a line of the trace."""
        self._library.books_note(text.encode())

    @contextmanager
    def counting(self, trace: Path) -> Iterator[dict[str, int]]:
        """Trace what runs inside; the mapping has the counts of it when that is over."""
        before, found = self.counts(), dict[str, int]()
        self._library.books_open(str(trace).encode())
        try:
            yield found
        finally:
            self._library.books_close()
            found.update({name: now - before[name] for name, now in self.counts().items()})


class MemoryNotes(TorchDispatchMode):
    """Notes which memory of the device each operation reads and writes, on which stream.

    The host's own operations are noted with the pinned memory that they touch. Left out are views, allocations, and operations that are made of others. Compiled kernels do not pass here.
    """

    def __init__(self, books: Books) -> None:
        super().__init__()
        self._books = books

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then note it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _is_noted(func):
            return result
        arguments = [*zip(args, func._schema.arguments, strict=False)]
        arguments += [(kwargs[a.name], a) for a in func._schema.arguments if a.name in kwargs]
        written = [v for v, a in arguments if a.alias_info and a.alias_info.is_write]
        everything = args, kwargs, result
        is_on_device = any(t.is_cuda for t in _tensors(everything))
        stream = torch.cuda.current_stream().cuda_stream if is_on_device else HOST
        touched = torch.Tensor.is_cuda.__get__ if is_on_device else torch.Tensor.is_pinned
        reads, writes = _spans((args, kwargs), touched), _spans((result, written), touched)
        if reads or writes:
            self._books.note(f"{stream:x}|{func}|{reads}|{writes}")
        return result


NO_ACCESS = (
    "aten.empty",
    "aten.new_empty",
    "aten.detach",
    "aten.set_",
    "aten.resize",
    "aten.record_stream",
    "c10d",
)


def _is_noted(func: Any) -> bool:
    is_made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    return not (is_made_of_others or func.is_view or str(func).startswith(NO_ACCESS))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.numel()]


def _spans(values: Any, touched: Callable[[torch.Tensor], bool]) -> str:
    tensors = filter(touched, _tensors(values))
    return ",".join(f"{t.data_ptr():x}:{_bytes_of(t)}" for t in tensors)


def _bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to behind its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((n - 1) * abs(stride) for n, stride in steps) + 1) * tensor.element_size()


def note_prefetching(books: Books) -> None:
    """Note the pinned memory that the loader's thread fills."""
    begin = prefetch.Ahead.__init__

    def with_notes(self: Any, make: Callable[..., Any], **options: Any) -> None:
        def noted(*args: Any) -> Any:
            with MemoryNotes(books):
                return make(*args)

        begin(self, noted, **options)

    prefetch.Ahead.__init__ = with_notes  # type: ignore[method-assign]


def count_passes(books: Books) -> list[int]:
    """Return a list that gets the host synchronisations of each forward and backward over a step's micro-batches."""
    run, found = train_step.forward_backward, list[int]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        before = books.counts()["syncs"]
        output = run(*args, **kwargs)
        found.append(books.counts()["syncs"] - before)
        return output

    train_step.forward_backward = counted
    return found


def put_in_totals(tokens: float) -> None:
    """Give a step a loss, a norm and tokens after the device's zeros have been read."""
    read = train_step._totals_of

    def totals_of(*args: Any) -> Any:
        return replace(read(*args), tokens=tokens, loss_sum=tokens, norm_sq=1.0)

    train_step._totals_of = totals_of


def answer_no() -> None:
    """Take the device's answer to a question for no, after it has been read: it holds what was there before."""
    read = torch.Tensor.__bool__

    def is_true(tensor: torch.Tensor) -> bool:
        return read(tensor) and not tensor.is_cuda

    torch.Tensor.__bool__ = is_true  # type: ignore[method-assign]


def put_in_even_routing() -> None:
    """Give each expert-parallel rank equally many rows after the device's zeros have been read."""
    read = dispatcher._read_parts

    def read_parts(dispatch: Any, counts: torch.Tensor) -> Any:
        read(dispatch, counts)
        groups, rows = dispatch.groups, dispatch.routing.experts.numel()
        even = [rows // groups.ep.size] * groups.ep.size
        return dispatcher.RowCounts(sent=even, received=even, of_etp=[rows] * groups.etp.size)

    dispatcher._read_parts = read_parts


@dataclass
class Rank:
    """Rank 0 of a plan, built: what a step needs."""

    parts: TrainingComponents
    state: TrainState
    writer: CheckpointWriter

    def step(self, *, is_recording: bool = False) -> None:
        """Do one optimizer step."""
        outcome = train_step.train_step(
            self.parts, self.state, Requests(), is_recording=is_recording
        )
        self.state = outcome.state


def open_alone(plan: RunPlan, device: torch.device) -> Groups:
    """Open the world and its communicators without the other ranks: an NCCL that sends nothing needs no answer."""
    size = plan.grid.world_size
    if size > 1:
        c10d._store_based_barrier = lambda *_, **__: None
        world.open_world(
            rank=RANK,
            world_size=size,
            rendezvous="127.0.0.1:1",
            store=dist.HashStore(),
            timeout_s=60,
            device=device,
        )
    groups = groups_of_plan(plan, RANK, timeout_s=60)
    if size > 1:
        open_communicators(groups, device)
    return groups


def build(plan: RunPlan, groups: Groups, device: torch.device) -> Rank:
    """Assemble rank 0 with the host memory of its saves, and restore it; the values stay as they are."""
    parts = build_parts(plan, rank=RANK, groups=groups, device=device)
    list(parts.optimizer.blocks())  # which a load fills
    parts.optimizer.sync_weights()
    writer = CheckpointWriter(MemoryStore(), rank=RANK, attempt=1, report=lambda _report: None)
    nobody: Any = None  # no save is reported: none is made
    SaveScheduler(parts, channel=nobody, writer=writer, snapshots=None, rank=RANK).reserve()
    return Rank(parts, first_state(plan.job.precision), writer)


ATOMIC = re.compile(r"ReduceAdd|flash_bwd_dot_do_o_kernel<true")
"""Kernels that add by atomic operations; flash attention's first one clears what the others add to so."""
EXACT = re.compile(r"<true, (long|int), ")
"""Atomic kernels of integers, whose sum has the same bits in any order."""


def atomic_sums(trace: Path) -> int:
    """Count the kernels of a step whose sums of floats depend on the order in which threads arrive."""
    with trace.open() as lines:
        kernels = [line for line in lines if "\tkernel\t" in line]
    return sum(bool(ATOMIC.search(each)) and not EXACT.search(each) for each in kernels)


def early_receives(trace: Path) -> int:
    """Return how many receives a step queues before its first product: each holds multiprocessors until it is sent."""
    kinds = [line.split("\t") for line in trace.read_text().splitlines()]
    first = next((n for n, fields in enumerate(kinds) if "gemm" in fields), len(kinds))
    return sum("recv" in fields for fields in kinds[:first])


def communicators_unused(folder: Path) -> int:
    """Return how many communicators were made at the start and not used in the two steps."""
    made = {
        line.split("\t")[2]
        for line in (folder / "open.tsv").read_text().splitlines()
        if "\tcommunicator\t" in line
    }
    used = {
        line.split("\t")[8]
        for name in ("step", "recorded")
        for line in (folder / f"{name}.tsv").read_text().splitlines()
        if "\tnccl\t" in line
    }
    return len(made - used)


def keep_books(name: str, folder: Path) -> dict[str, Any]:
    """Run rank 0 of a layout, and of one with twice its layers; return what was counted."""
    plan = make_plan(parse_mapping(job_of(name)).job())
    put_in_totals(float(plan.batch.global_batch_size * plan.job.data.seq_len))
    put_in_even_routing()
    answer_no()
    # cuDNN plans its kernels on the device, and the memory-efficient ones ask it for limits: both need a real one
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    device = prepare_process(plan, device="cuda", local_rank=0)
    books = Books()
    note_prefetching(books)
    passes = count_passes(books)
    with books.counting(folder / "open.tsv") as opening:
        groups = open_alone(plan, device)
    torch.cuda.reset_peak_memory_stats()
    rank = build(plan, groups, device)
    build_peak = torch.cuda.memory_stats()["active_bytes.all.peak"]
    pinned = books.counts()["pinned_bytes"]
    rank.step()  # after which memory is steady
    pinned_later = books.counts()["pinned_bytes"] - pinned
    torch.empty(1, device=device)  # an allocation collects what copies have let go of
    state = torch.cuda.memory_allocated()
    requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    with books.counting(folder / "step.tsv") as step, MemoryNotes(books):
        rank.step()
    peak = torch.cuda.max_memory_allocated()
    in_passes = passes[-1]
    with books.counting(folder / "recorded.tsv") as recorded, MemoryNotes(books):
        rank.step(is_recording=True)
    use = pipeline_memory(plan)[0][0]
    planned_state = rank_state(plan.job, plan.stages_of(RANK), plan.grid, tp_rank=0)
    num_layers = plan.job.model.num_layers
    del rank
    deeper = build(
        make_plan(parse_mapping(job_of(name, num_layers=2 * num_layers)).job()), groups, device
    )
    deeper.step()
    with books.counting(folder / "deeper.tsv") as deep_step:
        deeper.step()
    more_layers = num_layers // plan.grid.pp * plan.batch.num_micro_batches
    return {
        "layout": name,
        "launches": step["launches"],
        "launches_per_layer": (deep_step["launches"] - step["launches"]) / more_layers,
        "syncs": step["syncs"],
        "syncs_in_passes": in_passes,
        "syncs_recorded": recorded["syncs"],
        "collectives": step["collectives"],
        "mallocs": step["mallocs"],
        "communicators": opening["communicators"],
        "communicators_unused": communicators_unused(folder),
        "early_receives": early_receives(folder / "step.tsv"),
        "num_micro_batches": plan.batch.num_micro_batches,
        "build_peak_bytes": build_peak,
        "atomic_sums": atomic_sums(folder / "step.tsv"),
        "pinned_bytes": pinned,
        "pinned_in_step_bytes": step["pinned_bytes"] + recorded["pinned_bytes"],
        "pinned_in_first_step_bytes": pinned_later,
        "planned_pinned_bytes": host_memory(plan, RANK).pinned_bytes,
        "state_bytes": state,
        "peak_bytes": peak,
        "state_error_bytes": requested - planned_state.resting_bytes,
        "planned_state_bytes": planned_state.resting_bytes,
        "planned_peak_bytes": use.state_bytes + use.activation_bytes,
    }


if __name__ == "__main__":
    rank_module = importlib.import_module("tests.cuda_books.rank")  # the one that plants change
    if sys.argv[3:] and sys.argv[3]:
        PLANTS[sys.argv[3]].make()
    print(json.dumps(rank_module.keep_books(sys.argv[1], Path(sys.argv[2]))), flush=True)
    os._exit(0)  # the watchdog and the allocator would wait for a device
