"""Ranks that take a step and save, as a worker does; and what lies in the store then, as texts.

Imports torch, so only tests.golden.pinned's own process imports it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raymega.checkpoint.format.manifest import commit
from raymega.checkpoint.format.manifest_builder import assemble
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.messages import Requests
from raymega.plan.run_plan import read_plan
from raymega.plan.zero_levels import data_parallel_shard_size
from raymega.storage.local import LocalStore
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.golden.folding import fold
from tests.support.jobs import make_test_plan
from tests.support.ranks import RankEnv, run_grid

CREATED = "2026-01-02T03:04:05+00:00"
ATTEMPT = 3
LENGTH_BYTES = 8
"""Before a data file's header."""
COMPUTED = re.compile(r'(?<="crc32":)\s?\d+|\d+\.\d{6,}(?:e-?\d+)?')
"""In a manifest: checksums, and the losses and norms that the state remembers."""


def saved(overrides: Sequence[str], folder: Path, *, timeout_s: float) -> dict[str, str]:
    """Texts of the checkpoint: what it says, how its files begin, and digests of all of its bytes."""
    plan = make_test_plan(*overrides)
    shards = run_grid(
        _step_and_save, plan.grid, plan.to_json(), str(folder), sharers=data_parallel_shard_size(plan.job.parallel),
        timeout=timeout_s,
    )  # fmt: skip
    manifest = assemble(
        shards, world_size=plan.grid.world_size, attempt=ATTEMPT, created=CREATED,
        job=plan.job.model_dump(mode="json"), grid=plan.grid.degrees(), metrics={"eval/loss": 0.5},
    )  # fmt: skip
    store = LocalStore(folder)
    commit(store, manifest)
    keys = sorted(store.list(""))
    text = store.get(manifest.key).decode()
    return {
        "manifest.txt": f"{manifest.key}\n{fold(COMPUTED.sub('*', text), depth=3)}\n",
        "files.txt": "".join(
            _described(store, key) for key in keys if key.endswith(".safetensors")
        ),
        "digests.txt": "".join(f"{_digest(store.get(key))} {key}\n" for key in keys),
    }


def _step_and_save(env: RankEnv, plan_json: str, uri: str) -> Any:
    """The rank's report of its save after one step."""
    parts = build_parts(read_plan(plan_json), rank=env.rank, groups=env.groups, device=env.device)
    state = train_step(parts, TrainState(), Requests(), is_recording=False).state
    reports: list[Any] = []
    writer = CheckpointWriter(
        LocalStore(Path(uri)), rank=env.rank, attempt=ATTEMPT, report=reports.append
    )
    writer.save(state.step, list(parts.optimizer.blocks()), state.scalars())
    assert writer.wait()
    return reports[-1]


def _described(store: LocalStore, key: str) -> str:
    """Name, length and header of a data file."""
    data = store.get(key)
    end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    header = data[LENGTH_BYTES:end].decode()
    return f"{key}: {len(data)} bytes, header {end - LENGTH_BYTES}\n{fold(header, depth=1)}\n"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
