"""A dense checkpoint becomes a mixture of experts that begins as the dense model, on any grid."""

import numpy as np
import pytest
import torch

from raymega.checkpoint.format.manifest import commit
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.messages import Requests
from raymega.plan.run_plan import read_plan
from raymega.storage.local import LocalStore
from raymega.storage.registry import open_store
from raymega.train.build import build_parts
from raymega.train.entry import init_from
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.unit.checkpoint.support import assemble_shards

pytestmark = pytest.mark.dist

SMALL = ("model.num_layers=2", "model.ffn_hidden_size=24", "data.global_batch_size=8")
COPIES = ("model.moe.num_experts=4", "model.moe.first_k_dense_replace=1")
BIASED = (
    "model.moe.router_score_function=sigmoid",
    "model.moe.expert_bias=true",
    "model.moe.expert_bias_update_rate=0.1",
)
PARTS = (
    *COPIES,
    *BIASED,
    "model.moe.intermediate_size=12",
    "model.moe.top_k=4",
    "model.moe.num_experts=8",
)
STEPS = 2


def _plan(layout, *overrides):
    return make_test_plan(*SMALL, *layout_overrides(layout), *overrides)


def _logits(parts):
    """This rank's columns [S, B, V/tp] for some tokens, whose routers choose what they will."""
    model, data = parts.plan.job.model, parts.plan.job.data
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, model.vocab_size, (2, data.seq_len), generator=generator)
    (module,) = parts.modules
    parts.weights.start_gather()
    with torch.no_grad():
        return module.logits(tokens, None).numpy()


def _save(env, plan_json, uri):
    """Trains a few steps from the first values and saves; logits then, and the next step's loss."""
    parts = build_parts(read_plan(plan_json), rank=env.rank, groups=env.groups, device=env.device)
    state, shards = TrainState(), []
    for _ in range(STEPS):
        state = train_step(parts, state, Requests(), is_recording=False).state
    writer = CheckpointWriter(open_store(uri), rank=env.rank, attempt=1, report=shards.append)
    writer.save(state.step, list(parts.optimizer.blocks()), state.scalars())
    assert writer.wait()
    logits = _logits(parts)
    loss = train_step(parts, TrainState(), Requests(), is_recording=False).loss
    return shards[-1], logits, loss


def _begin(env, plan_json):
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    init_from(parts, plan.job.checkpoint)
    logits = _logits(parts)
    outcome = train_step(parts, TrainState(), Requests(), is_recording=False)
    return logits, outcome.loss, outcome.grad_norm


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Where a dense model of two ranks lies, its logits, and its next loss on the first samples."""
    folder, plan = tmp_path_factory.mktemp("dense"), _plan("tp2")
    results = run_grid(_save, plan.grid, plan.to_json(), str(folder))
    commit(LocalStore(folder), assemble_shards([shard for shard, *_ in results], plan.grid))
    return folder, _whole([logits for _, logits, _ in results], plan.grid), results[0][2]


def _whole(columns, grid):
    """What the tensor-parallel ranks of a replica hold, side by side; all replicas have the same."""
    found = [
        np.concatenate(columns[first : first + grid.tp], -1)
        for first in range(0, len(columns), grid.tp)
    ]
    for logits in found[1:]:
        np.testing.assert_array_equal(logits, found[0])
    return found[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("experts", [COPIES, PARTS], ids=["copies", "parts chosen by a bias"])
def test_upcycled_model_begins_as_the_dense_one_on_any_grid(dense, experts):
    folder, wanted, loss = dense
    start = (f"checkpoint.init_from={folder}", "checkpoint.init_upcycle=true")
    norms = []
    for layout in ("tp1", "tp2-dp2-ep2-etp2"):
        sharding = "none" if layout == "tp1" else "optimizer"
        plan = _plan(layout, *experts, *start, f"parallel.sharding={sharding}")
        found = run_grid(_begin, plan.grid, plan.to_json())
        logits = _whole([columns for columns, *_ in found], plan.grid)
        assert np.abs(logits - wanted).max() < 1e-12 * np.abs(wanted).max()
        np.testing.assert_allclose([begun for _, begun, _ in found], loss, rtol=1e-12)
        norms += [norm for *_, norm in found]
    np.testing.assert_allclose(norms, norms[0], rtol=1e-9)
