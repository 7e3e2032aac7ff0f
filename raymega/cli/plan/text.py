"""Output of a plan in `raymega plan`: tables for people, one JSON object for programs."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache

from raymega import api
from raymega.cli.output import print_json, table
from raymega.cli.plan import predictions
from raymega.cli.plan.datasets import datasets_object, show_datasets
from raymega.cli.plan.host_memory import most_host_memory, readable, show_host_memory
from raymega.cli.plan.notes import notes
from raymega.cli.plan.ranks import first_ranks, rank_sizes, show_ranks
from raymega.cli.plan.teacher import most_teacher_memory, show_teacher
from raymega.errors import counted
from raymega.plan.batch import BatchPlan, Phase, phases
from raymega.plan.grid import Coords
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.hardware.lookup import ROUND_H100
from raymega.plan.memory.activation_bytes import peak_bytes, stage_activations
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.state_bytes import StateSize, count_parameters, rank_state
from raymega.plan.packing.step_estimate import MOST_RANKS, PackedStep
from raymega.plan.run_plan import RunPlan
from raymega.plan.save_cost import SaveCost, save_cost, shares_snapshot
from raymega.plan.snapshot_replicas import NUM_GENERATIONS, SnapshotCost, snapshot_cost
from raymega.plan.stages import Stage
from raymega.planner.cost.context_cost import context_costs
from raymega.planner.search.fallback import Fallback, fallbacks
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.stage_placement import Program
from raymega.schedule.table import make_schedule
from raymega.schedule.text import timetable

MOST_FALLBACKS = 4


def show_plan(plan: RunPlan, *, as_json: bool, device: Accelerator | None = None) -> None:
    """Print a plan as tables or as one JSON object; with ``device``, also its predicted time and memory."""
    found = predictions.prediction(plan, device) if device else None
    if as_json:
        shown = {**_plan_object(plan), **datasets_object(plan.job), **_packing_object(plan)}
        if plan.job.run.eval_tasks:  # they load pyarrow and tokenizers
            from raymega.cli.plan.tasks import tasks_object

            shown |= tasks_object(plan, device)
        shown["fallbacks"] = _fallback_objects(plan, device)
        if found and device:
            shown["prediction"] = {
                **predictions.prediction_object(found, device),
                **predictions.bill_object(found, device),
            }
        print_json(shown)
        return
    _show_summary(plan)
    _show_stages(plan)
    show_ranks(plan, _activation_bytes(plan))
    _show_context(plan)
    show_datasets(plan.job)
    _show_packing(plan)
    if plan.job.run.eval_tasks:
        from raymega.cli.plan.tasks import show_tasks

        show_tasks(plan, device)
    _show_saves(plan)
    _show_snapshots(plan)
    show_teacher(plan)
    show_host_memory(plan)
    _show_fallbacks(plan, device)
    _show_schedule(plan)
    if found and device:
        predictions.show_prediction(found, device)
        predictions.show_bill(found, device)
    else:
        print("\nwhole run: --gpu NAME predicts its time, and --price DOLLARS an hour its cost")
    for note in notes(plan, rank_sizes(plan)):
        print(note)


def _activation_bytes(plan: RunPlan) -> tuple[int, ...]:
    """Return the peak activation bytes of each pipeline rank, over all batch sizes of the run."""
    by_batch = [_activation_bytes_of(plan, batch) for batch in plan.batches]
    return tuple(max(peaks) for peaks in zip(*by_batch, strict=True))


def _activation_bytes_of(plan: RunPlan, batch: BatchPlan) -> tuple[int, ...]:
    """Return the peak activation bytes of each pipeline rank in a step with ``batch``, by formula."""
    shape, placement = activation_shape(plan.job), plan.placement
    stages = [stage_activations(shape, stage) for stage in plan.stages]
    return tuple(
        peak_bytes(
            work,
            [stages[placement.stage(pp, chunk)] for chunk in range(placement.chunks)],
            wgrad_activation_fraction=plan.job.schedule.wgrad_activation_fraction,
        )
        for pp, work in enumerate(_program(plan, batch).lists)
    )


def _bubble(plan: RunPlan, batch: BatchPlan) -> float:
    return simulate(_program(plan, batch), Durations()).bubble


def _program(plan: RunPlan, batch: BatchPlan) -> Program:
    return _schedule(plan.job.schedule.name, plan.sizes(batch))


_schedule = lru_cache(maxsize=2)(make_schedule)  # a large one takes a second


def _plan_object(plan: RunPlan) -> dict[str, object]:
    job, grid = plan.job, plan.grid
    return {
        "run": job.run.name,
        "grid": grid.degrees(),
        "world_size": grid.world_size,
        "num_parameters": count_parameters(job.model),
        "batch": plan.batch,
        "batch_phases": [_phase_object(plan, phase) for phase in phases(plan.ramp, plan.batch)],
        "stages": plan.stages,
        "schedule": job.schedule.name,
        "bubble": _bubble(plan, plan.batch),
        "snapshot_every": job.elastic.snapshot_every,
        "context_parallel": context_costs(job),
        "host_memory": most_host_memory(plan),
        **({"teacher": most_teacher_memory(plan)} if job.distillation.is_live else {}),
        "ranks": _rank_objects(plan),
    }


def _rank_objects(plan: RunPlan) -> list[dict[str, object]]:
    """Return an object for each kind of rank of a pipeline stage: what it holds, and how many ranks do."""
    activations, has_snapshots = _activation_bytes(plan), plan.job.elastic.snapshot_every > 0
    # tensor-parallel ranks of equal kinds, by what they hold
    kinds: dict[tuple[int, StateSize, SaveCost], list[int]] = {}
    for (pp, tp), rank in first_ranks(plan).items():
        size = rank_state(plan.job, plan.stages_of(rank), plan.grid, tp_rank=tp)
        kinds.setdefault((pp, size, save_cost(plan, rank)), []).append(tp)
    found = []
    for (pp, size, save), tp_ranks in kinds.items():
        rank = plan.grid.rank(Coords(pp=pp, tp=tp_ranks[0], cp=0, dp=0))
        row: dict[str, object] = {
            "first_rank": rank,
            "num_ranks": len(tp_ranks) * plan.grid.replicas,
            "pp": pp,
            "tp": tp_ranks,
            **asdict(size),
            "total": size.total_bytes,
            "activation_bytes": activations[pp],
            "save": save,
        }
        found.append(row | ({"snapshot": snapshot_cost(plan, rank)} if has_snapshots else {}))
    return found


def _phase_object(plan: RunPlan, phase: Phase) -> dict[str, object]:
    return {
        **asdict(phase),
        "bubble": _bubble(plan, phase.batch),
        "activation_bytes": max(_activation_bytes_of(plan, phase.batch)),
    }


def _show_summary(plan: RunPlan) -> None:
    job, batch, grid = plan.job, plan.batch, plan.grid
    print(
        f"run {job.run.name}: {job.model.family}, {counted(count_parameters(job.model), 'parameter')}, "
        f"{job.precision.dtype}, {counted(job.run.steps, 'step')}"
    )
    is_cut = job.parallel.sequence_parallel and grid.degree("tp") > 1
    print(
        f"grid {grid.describe()}: {counted(grid.world_size, 'worker')}, rank order {grid.order}"
        f"{', sequence parallel' if is_cut else ''}"
    )
    print(
        f"batch: {counted(batch.global_batch_size, 'sequence')} of {counted(job.data.seq_len, 'token')} a step, as "
        f"{counted(batch.num_micro_batches, 'micro-batch')} of {batch.micro_batch_size} on each of "
        f"{counted(batch.dp, 'data-parallel rank')}{_tail(batch)}"
    )
    for phase in phases(plan.ramp, batch):
        _show_phase(plan, phase)


def _tail(batch: BatchPlan) -> str:
    return f"; {counted(batch.num_masked, 'padding slot')} masked" if batch.num_masked else ""


def _show_phase(plan: RunPlan, phase: Phase) -> None:
    """Print a phase of the batch ramp; nothing when the batch size never changes."""
    batch, last = phase.batch, phase.first_step + phase.num_steps - 1
    if phase.first_step == 1 and not phase.num_steps:
        return
    steps = f"steps {phase.first_step} to {last}" if phase.num_steps else "then"
    print(
        f"  {steps}, from sample {phase.first_sample:,}: {counted(batch.global_batch_size, 'sequence')}, "
        f"{counted(batch.num_micro_batches, 'micro-batch')}{_tail(batch)}; bubble {_bubble(plan, batch):.3f}, "
        f"activations up to {readable(max(_activation_bytes_of(plan, batch)))}"
    )


def _show_stages(plan: RunPlan) -> None:
    """Print a row per stage, with its pipeline rank and chunk if ranks hold several chunks."""
    # The pipeline rank of a stage is obvious without chunks.
    has_chunks = plan.placement.chunks > 1
    rows: list[tuple[object, ...]] = []
    for stage in plan.stages:
        has_tower = stage.is_first and plan.job.model.vision.is_on
        parts = {
            "embedding": stage.is_first,
            "vision tower": has_tower,
            "final norm, head, loss": stage.is_last,
        }
        also = ", ".join(name for name, is_here in parts.items() if is_here)
        seat = plan.placement.seat(stage.index) if has_chunks else ()
        rows.append((stage.index, *seat, _layers(stage), also))
    print()
    print(table(("stage", *(("pp", "chunk") if has_chunks else ()), "layers", "and"), rows))


def _layers(stage: Stage) -> str:
    # Stages may hold only the embedding or the head.
    last = stage.first_layer + stage.num_layers - 1
    if stage.num_layers > 1:
        return f"{stage.first_layer} to {last}"
    return str(last) if stage.num_layers else "none"


def _show_saves(plan: RunPlan) -> None:
    """Print what a checkpoint costs the rank with the largest part of it."""
    section = plan.job.checkpoint
    # All data-parallel replicas have the same size: look at the first.
    first = [rank for rank in range(plan.grid.world_size) if plan.grid.coords(rank).dp == 0]
    cost = max((save_cost(plan, rank) for rank in first), key=lambda cost: cost.share_bytes)
    # where the bytes are copied before they are written
    place = f"{readable(cost.buffer_bytes)} of host memory"
    if shares_snapshot(plan.job):
        place = "the memory of snapshots, which pause until it is written"
    elif cost.buffer_bytes < cost.share_bytes:
        place += ", in pieces while training stalls"
    least = f", in {cost.least_s:.1f} s or more" if section.bytes_per_s else ""
    print(
        f"\na checkpoint every {_steps(section.every) if section.every else 'run'}: a rank copies at "
        f"most {readable(cost.share_bytes)} to {place}, "
        f"and writes them in {counted(cost.num_files, 'file')}{least}"
    )


def _show_context(plan: RunPlan) -> None:
    """Print the cost of each method of context parallelism; nothing with cp=1."""
    costs, parallel = context_costs(plan.job), plan.job.parallel
    if not costs:
        return
    # The number of ranks that the group spans decides between NVLink and network.
    span = max(plan.grid.group("cp", 0)) + 1
    head = ("cp_method", "GFLOP", "to inner", "around", "memory while", "H100 ms")
    rows = [
        (
            cost.method + (" (chosen)" if cost.method == parallel.cp_method else ""),
            f"{cost.flops / 1e9:.3g}",
            readable(round(cost.inner_bytes)),
            readable(round(cost.outer_bytes)),
            readable(round(cost.passing_bytes)),
            f"{1e3 * cost.seconds(ROUND_H100, span=span):.3g}",
        )
        for cost in costs
    ]
    print(f"\ncontext parallel {parallel.cp}: attention of one layer and micro-batch, on each rank")
    print(table(head, rows))


def _show_snapshots(plan: RunPlan) -> None:
    """Print what in-memory snapshots cost the rank with the largest part; nothing without them."""
    every = plan.job.elastic.snapshot_every
    if not every:
        return
    # The largest part decides how much memory every node needs.
    cost = max(_snapshot_costs(plan), key=lambda cost: cost.share_bytes)
    print(
        f"\nsnapshots in memory every {_steps(every)}: a rank writes at most "
        f"{readable(cost.share_bytes)} on its node, and sends them to the next node's snapshot server"
    )
    print(
        f"host memory for each rank of a node: {readable(cost.buffer_bytes)} of its own, which the node's "
        f"snapshot server sees, and {readable(cost.server_bytes)} in that snapshot server ({NUM_GENERATIONS} snapshots of it "
        "and of a rank of the previous node); on one node half of that, which is lost with the node"
    )


def _steps(number: int) -> str:
    return counted(number, "step").removeprefix("1 ")


def _snapshot_costs(plan: RunPlan) -> list[SnapshotCost]:
    """Return the snapshot costs of one replica's ranks; other replicas have the same."""
    places = ((rank, plan.grid.coords(rank)) for rank in range(plan.grid.world_size))
    return [snapshot_cost(plan, rank) for rank, at in places if at.dp == at.cp == 0]


def _packing_object(plan: RunPlan) -> dict[str, object]:
    """Return the cost of packed documents as a JSON object; empty without packing."""
    if plan.job.data.packing == "none":
        return {}
    step, why = api.look_at_packing(plan)
    return {"packing": step or {"unknown": why}}


def _show_packing(plan: RunPlan) -> None:
    """Print the cost of packed documents, static and dynamic; nothing when none are packed."""
    if plan.job.data.packing == "none":
        return
    # Reading the documents' lengths may fail here: the data may be on the cluster only.
    step, why = api.look_at_packing(plan)
    seq_len, cp = plan.job.data.seq_len, plan.job.parallel.cp
    print(
        f"\npacked documents: a micro-batch has {seq_len // cp * plan.batch.micro_batch_size:,} tokens a "
        "rank at most, so activations are those above"
    )
    if step is None:
        print(f"documents are not known here ({why}); worst case: one document per row, as above")
        return
    print(
        f"the first step's {plan.batch.global_batch_size} rows hold {counted(step.num_documents, 'document')}, "
        f"{step.efficiency:.1%} of their tokens; attention sees {step.attention_share:.1%} of the pairs "
        "that rows without documents have"
    )
    print(
        f"static cp {cp}: {_h100_ms(step.static_s)} on the fullest stage, the busiest rank has "
        f"{step.static_imbalance:.2f} times the mean work"
    )
    if plan.job.parallel.dynamic_cp:
        _show_dynamic(step)


def _show_dynamic(step: PackedStep) -> None:
    found = step.dynamic
    if found is None:
        print(f"dynamic cp: not estimated for more than {MOST_RANKS} ranks of dp * cp")
        return
    print(
        f"dynamic cp: {_h100_ms(found.seconds)} ({step.static_s / found.seconds:.2f} times as fast), "
        f"the busiest rank {found.imbalance:.2f} times the mean; {counted(found.num_micro_batches, 'micro-batch')}, "
        f"a token's pack on {found.mean_ranks:.2f} ranks on average and {found.most_ranks} at the most"
    )


def _h100_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms of an H100"


def _fallback_objects(plan: RunPlan, device: Accelerator | None) -> list[dict[str, object]]:
    """Return the fallback grids as JSON objects, by decreasing number of workers."""
    return [
        {
            "most_workers": each.most,
            "least_workers": each.least,
            "grid": each.plan.grid.degrees(),
            "num_micro_batches": each.plan.batch.num_micro_batches,
        }
        for each in _fallbacks(plan, device)
    ]


def _show_fallbacks(plan: RunPlan, device: Accelerator | None) -> None:
    """Print the grids for fewer workers; nothing for a job with one worker."""
    section, world_size = plan.job.elastic, plan.grid.world_size
    if world_size == 1:
        return
    # three cases: wait, no smaller grid, a table of grids
    if section.min_workers == "grid":
        print("\nwhen workers are lost: wait for the whole grid (elastic.min_workers=grid)")
        return
    print(
        f"\nwhen workers are lost and not replaced within {section.replan_after_s:g} s, the run continues "
        "with the same global batch"
    )
    rows = [_fallback_row(each) for each in _fallbacks(plan, device)]
    print(table(("workers left", "grid", "uses", "micro-batches"), rows) if rows else "on no grid")


def _fallbacks(plan: RunPlan, device: Accelerator | None) -> list[Fallback]:
    if plan.job.elastic.min_workers == "grid":
        return []
    return fallbacks(plan.job, device=device, limit=MOST_FALLBACKS)


def _fallback_row(each: Fallback) -> tuple[object, ...]:
    left = f"{each.most:,}" if each.most == each.least else f"{each.most:,} to {each.least:,}"
    grid = each.plan.grid
    return left, grid.describe(), grid.world_size, each.plan.batch.num_micro_batches


def _show_schedule(plan: RunPlan) -> None:
    print(
        f"\nschedule {plan.job.schedule.name}: bubble {_bubble(plan, plan.batch):.3f} of ideal time (a forward "
        "takes 1, a backward 2, transfers 0); rows are ranks along pp"
    )
    print(timetable(_program(plan, plan.batch)))
