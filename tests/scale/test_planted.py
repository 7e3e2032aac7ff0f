"""Mistakes planted in a copy of the package, each of which makes a cost grow with the world; a curve must see it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[2]
START, RECORDS, WATCH = (f"tests/scale/test_{name}.py" for name in ("start", "records", "watch"))
CAUGHT = (
    "AssertionError", "DID NOT RAISE", "ArrowInvalid", "FileExistsError", "ray.exceptions.OutOfMemoryError",
)  # fmt: skip
"""How a test ends that sees a mistake, unlike one that cannot run."""
MANIFESTS, INDEX = "tests/scale/test_manifests.py", "tests/unit/checkpoint/format/test_box_index.py"
PASSES = "tests/unit/pipeline/test_pass_timer.py"
SNAPSHOTS = "tests/unit/checkpoint/snapshots/test_snapshot.py"
FLEET = "tests/scale/test_fleet.py::test_a_short_life_with_failures_keeps_every_invariant"
FLEET_SEED = "3"
"""Seed of a short life in which a node drains, a driver is paused and one meets a rival."""
COMMITTER = "tests/unit/orchestrate/driver/test_checkpoint_committer.py"
AXES = "tests/dist/parallel/test_world_along_axes.py"
KEPT, RETENTION = "tests/scale/test_kept.py", "tests/unit/checkpoint/tools/test_retention.py"
SHARED = "tests/dist/checkpoint/test_shared_load.py"
LOG = "tests/unit/checkpoint/format/test_commit_log.py"
LEASE = "tests/unit/orchestrate/run_store/test_lease.py"
HELD, REPLICAS = (
    "tests/dist/checkpoint/test_held_state.py", "tests/unit/orchestrate/driver/test_replicas.py",
)  # fmt: skip
ROWS = {
    "an update that a loss cuts off leaves a state that is held": (
        "checkpoint/load/held_state.py",
        'from now on."""\n        self.scalars = {}\n',
        'from now on."""\n',
        HELD,
    ),
    "a rank goes on from an older step that it holds": (
        "checkpoint/load/held_state.py",
        "has = held.step == step and fill(",
        "has = fill(",
        HELD,
    ),
    "the first replica is asked for the state, whoever holds it": (
        "checkpoint/load/held_state.py",
        "_share(scalars, blocks, replicas, owners[0])",
        "_share(scalars, blocks, replicas, 0)",
        HELD,
    ),
    "a driver takes a number again whose grant was deleted": (
        "orchestrate/run_store/lease.py",
        "if newest_epoch(self.store) > grant.epoch:",
        "if False:",
        LEASE,
    ),
    "every grant is deleted but the newest": (
        "checkpoint/format/epochs.py",
        "if old <= epoch - KEPT_GRANTS",
        "if old < epoch",
        LEASE,
    ),
    "a driver that waits for room deletes the log of the epoch before, and gives its own epoch back": (
        "orchestrate/run_store/lease.py",
        "if self._has_begun and self._tidied_epoch",
        "if self._tidied_epoch",
        LOG,
    ),
    "a range of checkpoints takes in one that is not on it": (
        "checkpoint/format/epochs.py",
        "if last.first == last.last or every == last.every:",
        "if True:",
        "tests/unit/checkpoint/format/test_epochs.py",
    ),
    "stages go on from different steps": (
        "orchestrate/driver/replicas.py",
        "if all(any(_is_at(ranks, held, step) for ranks in units) for units in whole)",
        "if any(any(_is_at(ranks, held, step) for ranks in units) for units in whole)",
        REPLICAS,
    ),
    "replicas keep their number when one before them is lost": (
        "orchestrate/driver/replicas.py",
        "_places(new, stage, number * unit, unit)",
        "_places(new, stage, 0, unit)",
        REPLICAS,
    ),
    "a run goes on from the state of a worker that raised an error": (
        "orchestrate/driver/replicas.py",
        "is_loss = failure.kind in (FailureKind.DIED, FailureKind.HUNG)",
        "is_loss = True",
        REPLICAS,
    ),
    "a recovery is over before a step was made": (
        "orchestrate/driver/recovery_log.py",
        "self._recovery.back_at = max(self._recovery.step, step + 1)",
        "self._recovery.back_at = self._recovery.step",
        REPLICAS,
    ),
    "every rank reads all parts of the index": (
        "checkpoint/format/box_index.py",
        "if wanted is not None and not any(wanted[first : last + 1]):",
        "if False:",
        f"{MANIFESTS}::test_checkpoint_is_described_within_bounds[4096]",
    ),
    "every rank keeps all boxes that it reads": (
        "checkpoint/format/box_index.py",
        "(table if blocks is None else table.meeting(blocks)).rows",
        "table.rows",
        f"{MANIFESTS}::test_checkpoint_is_described_within_bounds[4096]",
    ),
    "tensors of a kind side by side in the index": (
        "checkpoint/format/box_index.py",
        "    return name, kind\n",
        "    return kind, name\n",
        f"{MANIFESTS}::test_checkpoint_is_described_within_bounds[4096]",
    ),
    "the root before the parts of its index": (
        "checkpoint/format/manifest.py",
        "for key, data in objects_of(manifest):",
        "for key, data in reversed(list(objects_of(manifest))):",
        INDEX,
    ),
    "a part of the index is not compared with its checksum": (
        "checkpoint/format/box_index.py",
        "if data is None or (len(data), crc32(data)) != (part.num_bytes, part.crc32):",
        "if data is None:",
        INDEX,
    ),
    "a box that ends where a block begins counts as meeting it": (
        "checkpoint/format/box_table.py",
        "(after > offset)",
        "(after >= offset)",
        INDEX,
    ),
    "two boxes over one another count as one": (
        "checkpoint/format/coverage.py",
        "    return bool(counts.max() == 1)\n",
        "    return True\n",
        "tests/unit/checkpoint/format/test_manifest_builder.py",
    ),
    "all files of kept checkpoints are listed": (
        "checkpoint/tools/retention.py",
        "saved_steps(self._store) - {at.step for at in stay}",
        "saved_steps(self._store)",
        KEPT,
    ),
    "every kept checkpoint is examined": (
        "checkpoint/tools/retention.py",
        "len(examined) >= self._keep.last",
        "len(examined) >= 10**9",
        KEPT,
    ),
    "a manifest without an entry is passed over": (
        "checkpoint/format/catalogue.py",
        "return found | set(_without_entry(store, steps - {at.step for at in entries}))",
        "return found",
        KEPT,
    ),
    "an entry whose folder is gone counts": (
        "checkpoint/format/catalogue.py",
        "{manifest_key(at) for at in entries if at.step in steps}",
        "{manifest_key(at) for at in entries}",
        RETENTION,
    ),
    "an entry before its manifest": (
        "checkpoint/format/manifest.py",
        "    for key, data in objects_of(manifest):\n        _create",
        "    enter(store, at)\n    for key, data in objects_of(manifest):\n        _create",
        INDEX,
    ),
    "a manifest outlives its entry": (
        "checkpoint/tools/retention.py",
        "key=lambda key: (not is_entry(key), not is_manifest(key), key)",
        "key=lambda key: (not is_manifest(key), not is_entry(key), key)",
        RETENTION,
    ),
    "the driver asks for each file": (
        "storage/store.py",
        "        if isinstance(self._store, ListsSizes):\n",
        "        if False:\n",
        "tests/unit/storage/test_retry.py",
    ),
    "every rank asks for all shares": (
        "checkpoint/snapshots/copies.py",
        "if grid.degrees() == dict(holders.grid):",
        "if False:",
        "tests/scale/test_snapshots.py::"
        "test_lost_node_comes_back_from_its_partner_and_the_driver_hears_a_line_a_node[512]",
    ),
    "a server sends all boxes of a share": (
        "checkpoint/snapshots/queries.py",
        "BoxTable.of(part.shard.boxes).meeting(question.blocks)",
        "BoxTable.of(part.shard.boxes)",
        SNAPSHOTS,
    ),
    "a snapshot that lacks a rank's share is whole": (
        "checkpoint/snapshots/snapshot.py",
        "        if num_lacking:\n",
        "        if num_lacking == len(holders.by_rank):\n",
        SNAPSHOTS,
    ),
    "a share without its data counts": (
        "checkpoint/snapshots/queries.py",
        "if part is not None and _has_files(store, part):",
        "if part is not None:",
        SNAPSHOTS,
    ),
    "the second copy of a part is not asked for": (
        "checkpoint/snapshots/copies.py",
        "                        left -= set(found.ranks)\n",
        "                        left.clear()\n",
        SNAPSHOTS,
    ),
    "passes of all steps are summed": (
        "train/throughput.py",
        "        self._passes.begin_step()\n",
        "",
        PASSES,
    ),
    "a pass is read before the device has done it": (
        "pipeline/pass_timer.py",
        "        passes[-1][1].synchronize()\n",
        "",
        PASSES,
    ),
    "passes are not timed": (
        "pipeline/executor.py",
        "is_pass = together[0].task.op in COMPUTE",
        "is_pass = False",
        PASSES,
    ),
    "a look at all slots at each poll": (
        "orchestrate/workers/attempt_start.py",
        "self._due_at = self._num_answers + self._assignment.num_lacking()",
        "self._due_at = 0",
        f"{START}::test_ranks_are_assigned_once_and_every_worker_is_asked_four_times",
    ),
    "a snapshot's map in each start message": (
        "orchestrate/workers/attempt_start.py",
        "(ray.put(holders),)",
        "(holders,)",
        f"{START}::test_map_of_a_snapshot_travels_once_and_not_with_each_message",
    ),
    "a call for each placement group": (
        "orchestrate/workers/placement_slots.py",
        "if len(groups) <= FEW_GROUPS:",
        "if len(groups) >= 0:",
        f"{START}::test_ranks_are_assigned_once_and_every_worker_is_asked_four_times",
    ),
    "the memory of each rank computed anew": (
        "plan/snapshot_replicas.py",
        "kind = at.pp, at.tp, len(homes)",
        "kind = at.pp, rank, len(homes)",
        "tests/scale/test_plan.py",
    ),
    "slots of a drained node kept": (
        "orchestrate/workers/placement_slots.py",
        "        for group in _groups(old):\n            remove_placement_group(group)\n        self._replaced",
        "        self._replaced",
        "tests/scale/test_drains.py",
    ),
    "a search for a smaller grid at each tick": (
        "orchestrate/driver/scaling_policy.py",
        "if self._searched is None or self._searched[0] != key:",
        "if True:",
        "tests/unit/orchestrate/driver/test_scaling_policy.py",
    ),
    "a commit looks at all of the catalogue": (
        "orchestrate/driver/checkpoint_committer.py",
        "self._pruner.prune(CheckpointId(attempt=self._attempt, step=step))",
        "self._pruner.prune()",
        COMMITTER,
    ),
    "files of a save that failed are forgotten": (
        "checkpoint/tools/retention.py",
        "steps = self._saved | self._recent(whole) | gone",
        "steps = self._recent(whole) | gone",
        RETENTION,
    ),
    "a step that is saved again keeps its older entries": (
        "checkpoint/format/manifest.py",
        "others = take_out(store, at)",
        "others = []",
        RETENTION,
    ),
    "an axis of the world is left out of its sums": (
        "parallel/comm/process_groups.py",
        "axes = (groups.tp, *replicas, groups.pp_forward)",
        "axes = (groups.tp, *replicas)",
        f"{AXES}::test_sums_along_axes_are_those_of_one_group_and_equal_on_all_ranks[tp2-pp2-dp2]",
    ),
    "copies of a hybrid sharding are left out of the world's sums": (
        "parallel/comm/process_groups.py",
        "(groups.sharers, groups.copies) if is_hybrid",
        "(groups.sharers,) if is_hybrid",
        f"{AXES}::test_sums_along_axes_are_those_of_one_group_and_equal_on_all_ranks[hybrid]",
    ),
    "each rank keeps its own rounding of the world's sums": (
        "parallel/comm/collectives.py",
        "        broadcast(tensor, axis, source=0)\n",
        "        pass\n",
        f"{AXES}::test_all_ranks_take_the_bits_of_the_first_where_groups_round_differently",
    ),
    "a maximum along axes is a sum": (
        "parallel/comm/collectives.py",
        "start_all_reduce(tensor, each, op).wait(each.timeout_s)",
        'start_all_reduce(tensor, each, "sum" if group.axes else op).wait(each.timeout_s)',
        f"{AXES}::test_sums_along_axes_are_those_of_one_group_and_equal_on_all_ranks[tp2-pp2-dp2]",
    ),
    "groups of a drained node stay reserved": (
        "orchestrate/workers/placement_slots.py",
        "        for group in _groups(old):\n            remove_placement_group(group)\n        self._replaced",
        "        self._replaced",
        FLEET,
    ),
    "a sample is trained again after a resume": (
        "train/state.py",
        "        samples=samples,\n        tokens=tokens,\n        # Check",
        "        samples=max(0, samples - 1),\n        tokens=tokens,\n        # Check",
        FLEET,
    ),
    "a driver that has lost its lease goes on": (
        "orchestrate/run_store/lease.py",
        "        if self._taken_by is not None:\n            raise",
        "        if False:\n            raise",
        FLEET,
    ),
    "two drivers take one epoch": (
        "orchestrate/run_store/lease.py",
        "self.store.put(grant.key, [grant.to_json()], overwrite=False)",
        "self.store.put(grant.key, [grant.to_json()], overwrite=True)",
        FLEET,
    ),
    "a checkpoint that is to be kept is deleted": (
        "checkpoint/tools/retention.py",
        "        found |= {at for at in current if at.step % keep.every == 0}",
        "        pass",
        FLEET,
    ),
    "files of unfinished saves stay": (
        "checkpoint/tools/retention.py",
        "            yield from self._store.list(folder_of(step))",
        "            yield from self._store.list(folder_of(step) + 'manifest')",
        FLEET,
    ),
    "a commit under way counts before its manifest is there": (
        "checkpoint/format/commit_log.py",
        "for at in pending if is_there(store, manifest_key(at))}",
        "for at in pending}",
        LOG,
    ),
    "a damaged grant hides what was committed under it": (
        "checkpoint/format/commit_log.py",
        " or damaged_epoch(store, grant)",
        "",
        LOG,
    ),
    "a commit is noted after its manifest": (
        "orchestrate/driver/checkpoint_committer.py",
        "        self._log.begin(at, self._pruner.known)\n        commit(self._store, manifest)\n",
        "        commit(self._store, manifest)\n        self._log.begin(at, self._pruner.known)\n",
        COMMITTER,
    ),
    "a start lists the catalogue": (
        "checkpoint/format/manifest.py",
        "    if (known := known_checkpoints(store)) is not None:",
        "    if (known := None) is not None:",
        KEPT,
    ),
    "every block comes from the first replica": (
        "checkpoint/load/shared_load.py",
        "            send_block(block, group, reader)",
        "            send_block(block, group, 0)",
        SHARED,
    ),
    "each replica reads all blocks": (
        "checkpoint/load/shared_load.py",
        "                if reader == group.index:",
        "                if True:",
        SHARED,
    ),
    "the last step of each metric in a tag": (
        "tracking/mlflow_recorder.py",
        "json.dumps(floors)",
        "json.dumps(last_steps)",
        "tests/unit/tracking/test_mlflow.py::"
        "test_run_with_hundreds_of_metrics_goes_on_under_the_next_driver",
    ),
    "every rank in a line": (
        "tracking/jsonl.py",
        "MOST_RANKS, NUM_WORST = 64, 8",
        "MOST_RANKS, NUM_WORST = 10**9, 8",
        RECORDS,
    ),
    "monitors that answer each second, however many": (
        "orchestrate/workers/node_monitor.py",
        "return max(ANSWER_EVERY_S, num_nodes / ANSWERS_PER_S)",
        "return ANSWER_EVERY_S",
        "tests/unit/orchestrate/workers/test_node_monitor.py",
    ),
    "a driver that waits for room on a smaller grid spins": (
        "orchestrate/workers/ray_worker_group.py",
        "if (self._plan is self._asked or not self._slots.slots) and self._slots.wait(timeout_s):",
        "if self._plan is self._asked and self._slots.wait(timeout_s):",
        f"{START}::test_a_wait_for_room_takes_its_time_after_a_release",
    ),
    "a process that ends for want of memory ends the driver": (
        "orchestrate/workers/actor_calls.py",
        "import GetTimeoutError, RayError, RayTaskError",
        "import GetTimeoutError, RayActorError as RayError, RayTaskError",
        FLEET,
    ),
    "a monitor that keeps a death to itself": (
        "orchestrate/workers/ray_worker_group.py",
        "reports += self._lose_worker(slot, why)",
        "self._lose_worker(slot, why)",
        f"{WATCH}::test_death_that_a_monitor_tells_is_reported_once_and_a_lost_monitor_costs_nothing",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_curve_sees_the_mistake(name, tmp_path):
    file, old, new, test = ROWS[name]
    ignored = shutil.ignore_patterns("__pycache__", "golden", "cuda_books")
    for folder in ("raymega", "tests", "jobs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "raymega" / file
    assert path.read_text().count(old) == 1, f"{name}: {file} has changed"
    path.write_text(path.read_text().replace(old, new))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "FLEET_SEED": FLEET_SEED}
    command = [sys.executable, "-m", "pytest", "-x", "-q", test]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and any(how in ended.stdout for how in CAUGHT), ended.stdout
