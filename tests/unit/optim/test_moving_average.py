"""The moving average of the weights: its formula, its start, its place in a checkpoint, and the way out."""

from itertools import groupby

import numpy as np
import pytest
import torch

from raymega.checkpoint.format.manifest import commit
from raymega.checkpoint.format.manifest_builder import assemble
from raymega.checkpoint.load.held_state import HELD, NONE
from raymega.checkpoint.load.init_from import start_faults
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.schema import CheckpointSection
from raymega.convert.tuned.merge import merge
from raymega.errors import ConfigError, RaymegaError
from raymega.messages import Requests
from raymega.optim import optimizer
from raymega.plan.memory.state_bytes import rank_state
from raymega.plan.save_cost import save_cost
from raymega.storage.registry import open_store
from raymega.tracking.names import check_names
from raymega.train.build import build_parts
from raymega.train.evaluation.average import name_of_average
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.params import ALONE
from tests.unit.checkpoint.support import save_rank
from tests.unit.convert.folders import NOW

CPU, DECAY, STEPS = torch.device("cpu"), 0.8, 3


def _parts(*options):
    plan = make_test_plan(
        *layout_overrides("tp1"), "run.eval_samples=0", f"optimizer.ema_decay={DECAY}", "optimizer.lr_warmup_steps=0",
        *options,
    )  # fmt: skip
    return build_parts(plan, rank=0, groups=ALONE, device=CPU)


def _values(parts, kind):
    return {
        block.tensor.name: block.values.clone()
        for block in parts.optimizer.values()
        if block.kind == kind and block.tensor.is_trained
    }


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("precision.dtype=bfloat16",),
        ("optimizer.state_dtype=8bit",),
        ("optimizer.name=muon", "model.num_kv_heads=2"),
        ("memory.offload=[optimizer]",),
        ("model.lora.r=2",),
    ],
)
def test_the_average_is_that_of_the_formula(options):
    parts = _parts(*options)
    wanted, state = _values(parts, "model"), TrainState()
    assert wanted, "some weights are trained"
    torch.testing.assert_close(_values(parts, "ema"), wanted, rtol=0, atol=0)
    for _ in range(STEPS):
        state = train_step(parts, state, Requests(), is_recording=False).state
        for name, weights in _values(parts, "model").items():
            wanted[name] = DECAY * wanted[name] + (1 - DECAY) * weights
    found = _values(parts, "ema")
    digits = 1e-6 if "precision.dtype=bfloat16" in options else 1e-13
    torch.testing.assert_close(found, wanted, rtol=digits, atol=digits)
    assert any((found[name] != weights).any() for name, weights in _values(parts, "model").items())


def test_an_average_begins_with_the_weights_that_a_run_starts_from():
    parts = _parts()
    for block in parts.optimizer.blocks():
        if block.kind == "model":
            block.values.mul_(2.0)
    # a checkpoint that is resumed brings its average along, a start from other weights does not
    parts.optimizer.sync_weights()
    assert any((_values(parts, "ema")[n] != w).any() for n, w in _values(parts, "model").items())
    parts.optimizer.sync_weights(is_start=True)
    torch.testing.assert_close(_values(parts, "ema"), _values(parts, "model"), rtol=0, atol=0)


def _borrowed(parts):
    return HELD.borrowed(lambda: parts.optimizer.holds_masters)


@pytest.mark.parametrize("failing", [1, 2])
def test_nothing_is_held_of_an_exchange_that_failed_half_way(failing, monkeypatch):
    parts = _parts()
    HELD.begin(
        parts.optimizer.blocks(),
        train_step(parts, TrainState(), Requests(), is_recording=False).state.scalars(),
    )
    done, swap = [], optimizer._swap

    def failing_swap(*pair):
        done.append(pair)
        if len(done) == (failing - 1) * len(parts.optimizer._bucket_state) + 1:
            raise MemoryError
        swap(*pair)

    monkeypatch.setattr(optimizer, "_swap", failing_swap)
    with pytest.raises(MemoryError), _borrowed(parts), parts.optimizer.averaged():
        pass
    assert HELD.step == NONE
    HELD.drop()


def test_no_values_are_exchanged_while_a_gather_may_read_them(monkeypatch):
    parts, told = _parts(), []
    monkeypatch.setattr(type(parts.weights), "wait_for_all", lambda _: told.append("wait"))
    monkeypatch.setattr(optimizer, "_swap", lambda *_: told.append("swap"))
    with parts.optimizer.averaged():
        told.append("body")
    assert [word for word, _ in groupby(told)] == ["wait", "swap", "body", "wait", "swap"]


@pytest.mark.parametrize("options", [(), ("precision.dtype=bfloat16",)])
def test_weights_come_back_after_an_evaluation_of_the_average_that_fails(options):
    parts = _parts(*options)
    state = TrainState()
    for _ in range(STEPS):
        state = train_step(parts, state, Requests(), is_recording=False).state
    before = _values(parts, "model"), _values(parts, "ema")
    HELD.begin(parts.optimizer.blocks(), state.scalars())
    with pytest.raises(ZeroDivisionError), _borrowed(parts), parts.optimizer.averaged():
        assert HELD.step == NONE, "a process that ends here has another state"
        raise ZeroDivisionError
    assert HELD.step == STEPS
    HELD.drop()
    torch.testing.assert_close(
        (_values(parts, "model"), _values(parts, "ema")), before, rtol=0, atol=0
    )
    again = train_step(parts, state, Requests(), is_recording=False)
    assert again.loss > 0


@pytest.mark.parametrize("setting", ["optimizer.ema_decay=0", "run.eval_samples=0"])
def test_an_average_that_is_not_there_cannot_be_evaluated(setting):
    on = "run.eval_ema=true", "optimizer.ema_decay=0.9", "run.eval_samples=4"
    with pytest.raises(RaymegaError, match=r"run\.eval_ema=true.*optimizer\.ema_decay above 0"):
        make_test_plan(*on, setting)


def test_metrics_of_the_average_are_declared():
    names = [
        name_of_average(each) for each in ("eval/loss", "eval/accuracy", "eval/set_loss/held/out")
    ]
    assert names == ["eval/ema_loss", "eval/ema_accuracy", "eval/set_ema_loss/held/out"]
    check_names(names)


def test_a_checkpoint_of_the_average_is_a_model(tmp_path):
    parts = _parts("precision.dtype=float64", "optimizer.lr=0.1")
    train_step(parts, TrainState(), Requests(), is_recording=False)
    store, job = open_store(str(tmp_path / "run")), parts.plan.job
    shard = save_rank(store, list(parts.optimizer.blocks()), rank=0, step=1)
    manifest = assemble(
        [shard], world_size=1, attempt=1, created=NOW, grid={}, metrics={},
        job={"model": job.model.model_dump(mode="json")},
    )  # fmt: skip
    commit(store, manifest)
    done = merge([store.uri], str(tmp_path / "average"), created=NOW, is_average=True)
    found, wanted = open_checkpoint(done.uri), _values(parts, "ema")
    assert len(wanted) == len(found.names)
    for name, values in wanted.items():
        np.testing.assert_array_equal(found.read(f"model/{name}"), values)
    assert start_faults(CheckpointSection(init_from=done.uri), job.model) == []
    with pytest.raises(ConfigError, match="holds no moving average"):
        merge([done.uri], str(tmp_path / "again"), created=NOW, is_average=True)


def test_an_average_takes_as_many_bytes_as_the_masters():
    plan = make_test_plan("precision.dtype=bfloat16")
    with_it = make_test_plan("precision.dtype=bfloat16", "optimizer.ema_decay=0.9")
    size, more = (
        rank_state(each.job, each.stages_of(0), each.grid, tp_rank=0) for each in (plan, with_it)
    )
    assert more.moment_bytes - size.moment_bytes == size.master_bytes
    whole, larger = (save_cost(each, 0) for each in (plan, with_it))
    assert larger != whole
