"""What functions refuse that no command reaches without a cluster: one call each, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from raymega.checkpoint.format.dtypes import element_type
from raymega.checkpoint.format.epochs import LeaseHolder
from raymega.checkpoint.format.manifest import commit
from raymega.checkpoint.format.manifest_builder import assemble
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.load import parse_job
from raymega.data.format import local_folder
from raymega.data.open_split import Shape, open_split
from raymega.errors import ConfigError, RaymegaError, raise_faults
from raymega.messages import NodeSlots, ShardSaved
from raymega.orchestrate.cluster.node_probes import version_fault
from raymega.orchestrate.core.failure_policy import Failure, FailureKind, give_up_error
from raymega.orchestrate.core.rank_placement import WorkerLocation, assign_ranks, place_ranks
from raymega.orchestrate.core.state import RunState, State
from raymega.orchestrate.driver.restore_point import ROLLBACKS, nothing_readable, read_rollbacks
from raymega.orchestrate.driver.run_events import stopped
from raymega.orchestrate.jobs.submission import make_submission
from raymega.orchestrate.run_store.journal import open_record
from raymega.orchestrate.run_store.lease import Lease, hold_lease
from raymega.orchestrate.run_store.run_identity import precision_faults
from raymega.plan.hardware.catalog import accelerator
from raymega.plan.packing.cost import PackCost
from raymega.plan.packing.dynamic_cp import PackLimits, schedule_documents
from raymega.plan.snapshot_replicas import memory_faults
from raymega.planner.search.selection import best_grid
from raymega.schedule.checker import check
from raymega.schedule.instructions import Instruction, Op
from raymega.schedule.order import Sizes
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.stage_placement import Placement, Program
from raymega.schedule.table import make_schedule
from raymega.storage.keys import check_key
from raymega.storage.local import LocalStore
from raymega.tracking.names import check_names
from tests.golden.faults import NO_FAULT
from tests.golden.scenery import verify_job
from tests.golden.scratch import plain
from tests.support.fakes import FakeClock
from tests.support.jobs import VERIFY, make_test_plan
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.support import MODELS, make_blocks, make_grid, save_checkpoint
from tests.unit.convert.folders import NOW

ROWS = Shape(seq_len=32, packing="none", window=8)
STATE = RunState(attempt=1, step=7, saved_step=5, since_s=0.0, reason="asked to")
FAILURE = Failure(kind=FailureKind.RAISED, rank=1, step=7, error="ValueError", message="it is odd")


def told_of_calls(folder: Path) -> str:
    """Every call with what it raised."""
    lines = []
    for name, call in CALLS.items():
        lines.append(f"== {name}")
        try:
            call(folder)
            lines.append(f"{NO_FAULT}\n")
        except RaymegaError as error:
            lines.append(f"exit {error.exit_code}")
            lines += [f"{type(error).__name__}: {fault}" for fault in error.faults]
            lines.append("")
    return plain("\n".join(lines), folder)


def _too_little_memory(_folder: Path) -> None:
    plan = make_test_plan("elastic.snapshot_every=1")
    raise_faults(ConfigError, memory_faults(plan, ("a", "b"), {"a": 1, "b": 2**40}))


def _no_grid_fits(_folder: Path) -> None:
    best_grid(verify_job(), 2, accelerator("h100"), fits=lambda _grid: False)


def _long_document(_folder: Path) -> None:
    cost = PackCost(token_s=1.0, pair_s=1.0)
    schedule_documents([401], PackLimits(num_ranks=4, max_tokens=100), cost)


def _lists() -> list[list[Instruction]]:
    program = make_schedule("1f1b", Sizes(pp=2, num_micro_batches=2, chunks=1))
    return [list(schedule) for schedule in program.lists]


def _program(lists: list[list[Instruction]]) -> Program:
    return Program(placement=Placement(pp=len(lists)), lists=tuple(map(tuple, lists)))


def _backward_twice(_folder: Path) -> None:
    lists = _lists()
    lists[1].append(Instruction(op=Op.BACKWARD, micro_batch=1))
    check(_program(lists), num_micro_batches=2)


def _other_order(_folder: Path) -> None:
    lists = _lists()
    lists[0][0:4] = lists[0][2:4] + lists[0][0:2]
    check(_program(lists), num_micro_batches=2)


def _waits_for_ever(_folder: Path) -> None:
    lists = _lists()
    del lists[0][1]
    simulate(_program(lists), Durations())


def _no_room(_folder: Path) -> None:
    place_ranks((), make_test_plan("parallel.tp=2").grid, block=2)


def _no_gpu(_folder: Path) -> None:
    node = NodeSlots(node_id="n", address="", num_slots=0, cpus=8.0, needs_gpu=True)
    place_ranks((node, node), make_test_plan("parallel.pp=2").grid, block=1)


def _too_few_cpus(_folder: Path) -> None:
    node = NodeSlots(node_id="n", address="", num_slots=2, cpus=2.0)
    place_ranks((node,), make_test_plan("parallel.dp=4").grid, block=1)


def _group_is_parted(_folder: Path) -> None:
    places = [WorkerLocation(node_id=name, address="", pid=0) for name in ("a", "b")]
    assign_ranks(places, make_test_plan("parallel.tp=2").grid, block=2)


def _no_digits_dropped(_folder: Path) -> None:
    job = verify_job("precision.dtype=float32")
    raise_faults(ConfigError, precision_faults({"precision": {"dtype": "float64"}}, job))


def _outside(folder: Path) -> None:
    inside = folder / "raw"
    make_submission(verify_job(), job_file=VERIFY, overrides=(), working_dir=inside, attempt=1)


def _large_folder(folder: Path) -> None:
    """A file without blocks, of which only the length is looked at."""
    (folder / "large").mkdir()
    with (folder / "large" / "data.bin").open("wb") as stream:
        stream.truncate(600 * 2**20)
    job_file = folder / "large" / "job.yaml"
    job_file.write_text("{}")
    make_submission(
        verify_job(), job_file=job_file, overrides=(), working_dir=job_file.parent, attempt=1
    )


def _no_such_move(_folder: Path) -> None:
    STATE.move(State.RUNNING, now_s=0.0)


def _stopped(_folder: Path) -> None:
    raise stopped(open_record(MemoryStore(), verify_job(), now=NOW), STATE)


def _nothing_readable(_folder: Path) -> None:
    store = MemoryStore()
    record = open_record(store, verify_job(), now=NOW)
    raise_faults(ConfigError, [nothing_readable(record, store)])


def _given_up(_folder: Path) -> None:
    raise give_up_error(FAILURE, "elastic.max_failures=3 restarts are spent")


def _other_versions(_folder: Path) -> None:
    fault = version_fault({"torch": "1"}, "n", {"torch": "2"})
    raise_faults(ConfigError, [fault] if fault else [])


def _lost_reports(_folder: Path) -> None:
    state: dict[str, int | float | str] = {"step": 1}
    first = ShardSaved(rank=0, step=1, boxes=(), state=state, stall_s=0.0, write_s=0.0, num_bytes=0)
    shards = [
        first,
        replace(first, rank=1, error="the disk is full"),
        replace(first, rank=2, step=2),
    ]
    assemble(shards, world_size=4, attempt=1, created=NOW, job={}, grid={}, metrics={})


def _manifest_twice(folder: Path) -> None:
    store, manifest = open_checkpoint(str(folder / "ours"))
    commit(store, replace(manifest, created="later"))


def _folder_of_runs(folder: Path) -> None:
    open_checkpoint(str(folder))


def _model_of_hugging_face(folder: Path) -> None:
    (folder / "published").mkdir()
    (folder / "published" / "config.json").write_text("{}")
    open_checkpoint(str(folder / "published"))


def _absent_tensor(folder: Path) -> None:
    open_checkpoint(str(folder / "ours")).read("model/layers.0.mlp.up.weights")


def _other_model(folder: Path) -> None:
    """What a checkpoint lacks, has in another shape, and has beside it."""
    store, manifest = open_checkpoint(str(folder / "ours"))
    blocks = make_blocks(MODELS["llama-tied"], make_grid("tp1"), 0)
    wanted = [block for block in blocks if "final_norm" in block.name]
    load(store, manifest, wanted, expected=[box.tensor for box in manifest.boxes[1:]])


def _other_names(folder: Path) -> None:
    store, manifest = open_checkpoint(str(folder / "ours"))
    load(store, manifest, [], expected=[box.tensor for box in manifest.boxes[1:]])


def _not_narrowed(_folder: Path) -> None:
    model, store, grid = MODELS["llama-tied"], MemoryStore(), make_grid("tp1")
    manifest = save_checkpoint(store, model, grid, dtype=torch.float64)
    load(store, manifest, make_blocks(model, grid, 0)[:1])


def _not_once(folder: Path) -> None:
    store, manifest = open_checkpoint(str(folder / "half"))
    name = manifest.boxes[0].tensor
    blocks = make_blocks(verify_job().model, make_grid("tp1"), 0)
    load(store, manifest, [block for block in blocks if block.name == name])


def _rollback_is_odd(_folder: Path) -> None:
    store = MemoryStore()
    store.put(f"{ROLLBACKS}a0001.json", [b"{}"], overwrite=False)
    read_rollbacks(store)


def _store_in_a_file(folder: Path) -> None:
    LocalStore(folder / "raw" / "a.txt").put("key", [b""], overwrite=False)


def _opened(name: str, split: str, shape: Shape) -> Callable[[Path], object]:
    """The first row of a dataset's split."""
    return lambda folder: open_split(f"{folder}/{name}", split, shape, seed=1).row(0)


@contextmanager
def _two_drivers() -> Iterator[tuple[Lease, Lease]]:
    """One that has the run and lives, and one that wants it, on a clock by hand."""
    store, clock = MemoryStore(), FakeClock()

    def lease(host: str) -> Lease:
        return Lease(
            store, clock=clock, duration_s=30.0, sleep=lambda _s: first.renew(),
            holder=LeaseHolder(host=host, pid=1, machine="m", started="0", token=host),
            knows_gone=lambda _holder: False,
        )  # fmt: skip

    first = lease("a")
    first.acquire()
    yield first, lease("b")


def _run_is_held(_folder: Path) -> None:
    with _two_drivers() as (_, second):
        second.acquire()


def _two_of_one_object(_folder: Path) -> None:
    class Careless(MemoryStore):
        def put(self, key: str, chunks: Any, *, overwrite: bool) -> None:
            super().put(key, chunks, overwrite=True)

    with _two_drivers() as (first, _):
        first.store = Careless()
        with hold_lease(first):
            pass


def _run_was_taken(_folder: Path) -> None:
    with _two_drivers() as (first, second):
        first.release()
        second.acquire()
        first.begin_attempt()


CALLS: dict[str, Callable[[Path], object]] = {
    "snapshots above a node's memory": _too_little_memory,
    "no grid on the nodes that there are": _no_grid_fits,
    "a document above what ranks hold": _long_document,
    "a list with a backward twice": _backward_twice,
    "lists that send and receive in other orders": _other_order,
    "a list that waits for ever": _waits_for_ever,
    "no room on the cluster": _no_room,
    "no gpu on the cluster": _no_gpu,
    "too few cpus on the cluster": _too_few_cpus,
    "a tp group on two nodes": _group_is_parted,
    "digits that a run would drop": _no_digits_dropped,
    "a job outside the working folder": _outside,
    "a move that no run makes": _no_such_move,
    "a run that was stopped": _stopped,
    "a run whose checkpoints are all damaged": _nothing_readable,
    "a run that is given up": _given_up,
    "a node with other versions": _other_versions,
    "a save with lost reports": _lost_reports,
    "a manifest that is there already": _manifest_twice,
    "a tensor that no checkpoint has": _absent_tensor,
    "a folder of runs": _folder_of_runs,
    "a model of Hugging Face": _model_of_hugging_face,
    "a run with a living driver": _run_is_held,
    "a run that another driver took": _run_was_taken,
    "a store that creates an object twice": _two_of_one_object,
    "a working folder above what Ray ships": _large_folder,
    "a checkpoint of another model": _other_model,
    "a checkpoint of more than the model": _other_names,
    "a checkpoint with more digits": _not_narrowed,
    "a checkpoint with half a tensor": _not_once,
    "a rollback that cannot be read": _rollback_is_odd,
    "a store below a file": _store_in_a_file,
    "a split that is not there": _opened("novalid", "valid", ROWS),
    "a split that Megatron's files do not have": lambda folder: open_split(
        f"megatron:{folder}/theirs-bin/corpus", "valid", ROWS, seed=1
    ),
    "a split below a row": _opened("novalid", "train", ROWS),
    "documents whose begins nobody knows": _opened(
        "old", "train", replace(ROWS, packing="best_fit")
    ),
    "a token above the vocabulary": _opened("strange-tokens", "train", ROWS),
    "a shard of other bytes": _opened("zeros", "train", ROWS),
    "a shard of other bytes with documents": _opened(
        "zeros", "train", replace(ROWS, packing="best_fit")
    ),
    "a file of lengths of other bytes": _opened(
        "miscounted", "train", replace(ROWS, packing="best_fit")
    ),
    "a dataset in an unknown place": lambda _folder: local_folder("gs://team/tokens"),
    "a key that leaves the store": lambda _folder: check_key("../x"),
    "a metric that is in no table": lambda _folder: check_names(("train/lsos",)),
    "an element type that no checkpoint has": lambda _folder: element_type("complex64"),
    "overrides that are one text": lambda _folder: parse_job(VERIFY, "run.steps=1"),
}
