"""The moving average of the weights, evaluated during a run: its loss is that of the formula, on every layout."""

import pytest
import torch

from raymega.checkpoint.format.manifest import commit, read_manifest
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.messages import Requests
from raymega.plan.run_plan import read_plan
from raymega.storage.local import LocalStore
from raymega.storage.registry import open_store
from raymega.train.build import build_parts
from raymega.train.evaluation.average import evaluate_average
from raymega.train.forward_backward import evaluate
from raymega.train.state import TrainState
from raymega.train.step import train_step
from raymega.verify.plain_evaluation import plain_eval_losses
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.params import ALONE
from tests.support.ranks import run_grid
from tests.unit.checkpoint.support import assemble_shards

pytestmark = pytest.mark.dist

CPU, DECAY, STEPS, LIMIT = torch.device("cpu"), 0.8, 3, 1e-9
SETS = "data.validation=[{name: a, path: synthetic:a}]"
LAYOUTS = [
    ("tp2-pp2-sp", ()),
    ("dp2", ("parallel.sharding=parameters", "memory.offload=[optimizer]")),
    ("cp2", ()),
    ("dp2", ("parallel.sharding=optimizer", "precision.dtype=bfloat16")),
    ("tp2-dp2-ep2", ("model.moe.num_experts=4", "model.moe.intermediate_size=16")),
    ("dp2", ("parallel.sharding=gradients", "model.lora.r=2", "optimizer.state_dtype=8bit")),
]


def _plan(layout, *options):
    return make_test_plan(
        *layout_overrides(layout), "precision.dtype=float64", "optimizer.lr=0.05", "optimizer.lr_warmup_steps=0",
        "run.eval_samples=5", "data.global_batch_size=4", SETS, *options,
    )  # fmt: skip


def _weights(parts):
    return [b.values.clone() for b in parts.optimizer.values() if b.kind in ("model", "ema")]


def _run(env, plan_json, uri):
    """Curve, evaluations after the second and the last step, and the rank's part of a checkpoint."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    state, curve, found = TrainState(), [], {}
    while state.step < STEPS:
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        curve.append((outcome.loss, outcome.grad_norm))
        if plan.job.run.eval_ema and state.step > 1:
            before = _weights(parts)
            found[state.step] = evaluate(parts) | evaluate_average(parts)
            assert all(map(torch.equal, before, _weights(parts)))
    shards = []
    writer = CheckpointWriter(open_store(uri), rank=env.rank, attempt=1, report=shards.append)
    writer.save(state.step, list(parts.optimizer.blocks()), state.scalars())
    assert writer.wait()
    return curve, found, shards[-1]


def _resumed(env, plan_json, uri, key):
    """Evaluations of a checkpoint as a run goes on with it."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    store = open_store(uri)
    load(store, read_manifest(store, key), list(parts.optimizer.blocks()))
    parts.optimizer.sync_weights()
    return evaluate(parts) | evaluate_average(parts)


def _plain(options):
    """Losses of weights and average after steps 2 and 3 on one rank: averages by the formula, a document at a time."""
    parts = build_parts(_plan("tp1", *options), rank=0, groups=ALONE, device=CPU)
    masters = [block.values for block in parts.optimizer.blocks() if block.kind == "model"]
    average = [values.clone() for values in masters]
    state, found = TrainState(), {}
    while state.step < STEPS:
        state = train_step(parts, state, Requests(), is_recording=False).state
        average = [DECAY * mean + (1 - DECAY) * w for mean, w in zip(average, masters, strict=True)]
        kept = [values.clone() for values in masters]
        losses = [plain_eval_losses(parts)["eval_loss"]]
        for held in (average, kept):
            for values, others in zip(masters, held, strict=True):
                values.copy_(others)
            parts.optimizer.sync_weights()
            losses.append(plain_eval_losses(parts)["eval_loss"])
        assert losses[2] == losses[0], "the weights are back"
        found[state.step] = losses[:2]
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(("layout", "options"), LAYOUTS)
def test_loss_of_the_average_is_that_of_the_formula_and_changes_nothing(layout, options, tmp_path):
    wanted = _plain([o for o in options if not o.startswith(("parallel", "memory", "precision"))])
    average = f"optimizer.ema_decay={DECAY}"
    plan = _plan(layout, *options, average, "run.eval_ema=true")
    ranks = run_grid(_run, plan.grid, plan.to_json(), str(tmp_path / "run"))
    without = _plan(layout, *options, average)
    others = run_grid(_run, without.grid, without.to_json(), str(tmp_path / "other"))
    curve, found, _ = ranks[0]
    limit = 2e-2 if "precision.dtype=bfloat16" in options else LIMIT
    for step in (2, 3):
        of_weights, of_average = wanted[step]
        assert abs(of_average - of_weights) > 1e-3, "the average is another model"
        assert found[step]["eval/loss"] == pytest.approx(of_weights, rel=limit)
        assert found[step]["eval/ema_loss"] == pytest.approx(of_average, rel=limit)
        assert found[step]["eval/set_ema_loss/a"] == found[step]["eval/ema_loss"]
        assert "eval/ema_perplexity" in found[step]
    # all ranks know it, and no step is another one
    assert all(each[:2] == (curve, found) for each in ranks)
    assert all(each[0] == curve for each in others)
    # after a resume on one rank
    manifest = assemble_shards([shard for *_, shard in ranks], plan.grid)
    key = commit(LocalStore(tmp_path / "run"), manifest)
    alone = _plan(
        "tp1", *(o for o in options if not o.startswith("parallel")), average, "run.eval_ema=true"
    )
    (again,) = run_grid(_resumed, alone.grid, alone.to_json(), str(tmp_path / "run"), key)
    assert again == pytest.approx(found[STEPS], rel=max(limit, LIMIT))
