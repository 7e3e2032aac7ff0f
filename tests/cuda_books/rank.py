"""Rank 0 of a layout on the device that executes nothing: the phases of its life, each traced and counted.

The process must have the stand-in loaded. What the device would answer is put in by hand (`answers.py`); all else is
raymega's and torch's own code.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from raymega.config.load import parse_mapping
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
from raymega.train.forward_backward import evaluate
from raymega.train.save_schedule import SaveScheduler
from raymega.train.state import TrainState, first_state
from tests.cuda_books import answers
from tests.cuda_books.books import Books, Traffic, atomic_sums, traffic_of
from tests.cuda_books.happens_before import find_races
from tests.cuda_books.layouts import READS, WITHOUT_SAVE, job_of, rank_of
from tests.cuda_books.memory_notes import noting
from tests.cuda_books.reads import continue_prompts, score_rows
from tests.cuda_books.saves import make_scheduler, save_beside_a_step
from tests.cuda_books.trace import read_trace

WARM_UP = 2
"""Steps after which memory is steady: the allocator's blocks fit, and caches are filled."""


@dataclass
class Rank:
    """A rank of a plan, built: what a step needs."""

    parts: TrainingComponents
    state: TrainState
    scheduler: SaveScheduler

    def step(self, *, is_recording: bool = False, **options: Any) -> train_step.StepOutcome:
        """Do one optimizer step."""
        outcome = train_step.train_step(
            self.parts, self.state, Requests(), is_recording=is_recording, **options
        )
        self.state = outcome.state
        return outcome


@dataclass
class Ledger:
    """Counts of each phase, and the races of its trace."""

    books: Books
    folder: Path
    figures: dict[str, int] = field(default_factory=dict)
    races: list[str] = field(default_factory=list)
    traffic: dict[str, Traffic] = field(default_factory=dict)

    def trace(self, phase: str, work: Callable[[], object]) -> dict[str, int]:
        """Count ``work`` and read its trace; return all counters."""
        trace = self.folder / f"{phase}.tsv"
        with uncollected(), self.books.counting(trace) as counts:
            work()
        with trace.open() as lines:
            self.traffic[phase] = traffic_of(lines)
        return counts

    def look_for_races(self, phase: str, work: Callable[[], object]) -> dict[str, int]:
        """Trace ``work`` with notes of its memory, and check them; return all counters."""

        def noted() -> None:
            with noting(self.books):
                work()

        counts = self.trace(phase, noted)
        with (self.folder / f"{phase}.tsv").open() as lines:
            self.races += [f"{phase}: {race}" for race in find_races(read_trace(lines))]
        return counts

    def enter(self, phase: str, work: Callable[[], object]) -> dict[str, int]:
        """Look for races in ``work``, and keep its figures under the phase's name."""
        counts = self.look_for_races(phase, work)
        self.keep(phase, counts)
        return counts

    def keep(self, phase: str, counts: dict[str, int]) -> None:
        """Keep what is budgeted of each phase."""
        kept = ("syncs", "mallocs", "pinned_bytes")
        self.figures |= {f"{phase}.{name}": counts[name] for name in kept}


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect what lies in cycles, and nothing more inside: the moment would depend on what else the process has made."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def open_alone(plan: RunPlan, rank: int, device: torch.device) -> Groups:
    """Open the world and its communicators without the other ranks: an NCCL that sends nothing needs no answer."""
    size = plan.grid.world_size
    if size > 1:
        world.open_world(
            rank=rank,
            world_size=size,
            rendezvous="127.0.0.1:1",
            store=answers.OthersStore(),
            timeout_s=60,
            device=device,
        )
    groups = groups_of_plan(plan, rank, timeout_s=60)
    if size > 1:
        open_communicators(groups, device)
    return groups


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


def keep_book(name: str, folder: Path) -> dict[str, Any]:
    """Run a rank of a layout through its phases, the last with twice its layers; return what was counted."""
    plan, number = make_plan(parse_mapping(job_of(name)).job()), rank_of(name)
    ledger = Ledger(Books(), folder)
    answers.put_in(plan)
    device = prepare_process(plan, device="cuda", local_rank=0)
    is_saved, is_read = name not in WITHOUT_SAVE, name in READS
    _live(plan, number, device, ledger, is_saved=is_saved, is_read=is_read)
    # an abort, and a new start in the same process, of a model with twice the layers
    ledger.trace("abort", _abort)
    ledger.figures["left_bytes"] = torch.cuda.memory_allocated()
    num_layers = plan.job.model.num_layers
    deeper = make_plan(parse_mapping(job_of(name, num_layers=2 * num_layers)).job())
    launches = ledger.enter("reopened", start(deeper, number, device).step)["launches"]
    # sums over phases
    more_layers = num_layers // plan.grid.pp * plan.batch.num_micro_batches
    ledger.figures |= _communicators(ledger.traffic)
    ledger.figures["early_receives"] = ledger.traffic["step"].early_receives
    ledger.figures["atomic_sums"] = atomic_sums(folder / "step.tsv")
    use = pipeline_memory(plan)[plan.grid.coords(number).pp][0]
    return {
        "layout": name,
        "launches_per_layer": (launches - ledger.figures["step.launches"]) / more_layers,
        "planned_pinned_bytes": host_memory(plan, number).pinned_bytes,
        "planned_peak_bytes": use.state_bytes + use.activation_bytes,
        "races": ledger.races,
        "figures": ledger.figures,
    }


def _live(
    plan: RunPlan,
    number: int,
    device: torch.device,
    ledger: Ledger,
    *,
    is_saved: bool,
    is_read: bool,
) -> None:
    """Let a rank live up to the abort; nothing of it is held when this returns."""
    passes = count_passes(ledger.books)
    # start: communicators, model and state, and the first steps
    made: list[Rank] = []
    ledger.trace("start", lambda: made.append(start(plan, number, device, ledger)))
    rank = made.pop()
    torch.empty(1, device=device)  # an allocation collects what copies have let go of
    ledger.figures["state_bytes"] = torch.cuda.memory_allocated()
    requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
    at = plan.grid.coords(number)
    planned = rank_state(plan.job, plan.stages_of(number), plan.grid, tp_rank=at.tp)
    ledger.figures["state_error_bytes"] = requested - planned.resting_bytes
    # steps: the first without notes, which hold what they note a little longer
    torch.cuda.reset_peak_memory_stats()
    counts = ledger.trace("step", rank.step)
    ledger.keep("step", counts)
    ledger.figures |= {"peak_bytes": torch.cuda.memory_stats()["requested_bytes.all.peak"]}
    ledger.figures |= {"step.launches": counts["launches"], "step.syncs_in_passes": passes[-1]}
    ledger.figures |= {f"step.{k}": v for k, v in ledger.traffic["step"].figures().items()}
    ledger.look_for_races("noted", rank.step)
    ledger.enter("recorded", lambda: rank.step(is_recording=True))
    # what interrupts them
    if is_saved:
        ledger.enter("save", partial(save_beside_a_step, rank, is_snapshot=False))
    if plan.job.elastic.snapshot_every:
        ledger.enter("snapshot", partial(save_beside_a_step, rank, is_snapshot=True))
    ledger.enter("evaluation", lambda: evaluate(rank.parts))
    for phase, read in (("scores", score_rows), ("generation", continue_prompts)):
        if is_read:
            # the first pass of these shapes takes memory that stays
            ledger.figures[f"{phase}.peak_bytes"] = _peak_bytes(partial(read, rank.parts))
            ledger.enter(phase, partial(read, rank.parts))
    if is_read:
        ledger.figures["evaluation.peak_bytes"] = _peak_bytes(lambda: evaluate(rank.parts))


def _peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that ``work``, without notes of its memory, has asked for at once."""
    with uncollected():
        torch.cuda.reset_peak_memory_stats()
        work()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"]


def start(plan: RunPlan, number: int, device: torch.device, ledger: Ledger | None = None) -> Rank:
    """Open the communicators, assemble and restore the rank, reserve memory for its saves, and warm up."""
    groups = open_alone(plan, number, device)
    torch.cuda.reset_peak_memory_stats()
    parts = build_parts(plan, rank=number, groups=groups, device=device)
    list(parts.optimizer.blocks())  # which a load fills; the values stay as they are
    parts.optimizer.sync_weights()
    rank = Rank(parts, first_state(plan.job.precision), make_scheduler(parts, number))
    rank.scheduler.reserve()
    if ledger is not None:
        ledger.figures |= {
            "build_peak_bytes": torch.cuda.memory_stats()["active_bytes.all.peak"],
            "pinned_bytes": ledger.books.counts()["pinned_bytes"],
        }
    for _ in range(WARM_UP):
        rank.step()
    return rank


def _abort() -> None:
    world.abort_world()
    gc.collect()


def _communicators(traffic: dict[str, Traffic]) -> dict[str, int]:
    """Return how many communicators were made, how many of them no phase used, and how many an abort left."""
    opened, closed = traffic["start"].opened, traffic["abort"].closed
    phases = [seen for phase, seen in traffic.items() if phase not in ("start", "reopened")]
    used = set().union(*(seen.used for seen in phases))
    return {
        "communicators": len(opened),
        "communicators_unused": len(opened - used),
        "communicators_opened_late": len(set().union(*(seen.opened for seen in phases))),
        "communicators_left": len(opened - closed),
    }
