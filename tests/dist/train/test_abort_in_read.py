"""A rank that reads numbers while its world is aborted believes none of them, as NCCL leaves garbage there."""

import math
import threading
import time

import pytest
import torch

from raymega.checkpoint.save.host_copy import HostCopy
from raymega.errors import CommunicationError
from raymega.messages import Requests
from raymega.parallel.comm import collectives, world
from raymega.plan.run_plan import read_plan
from raymega.train import forward_backward, nan_locator, replica_divergence, step, train_statistics
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

GARBAGE = {"zeros": 0.0, "ones": 1.0, "nan": math.nan, "infinity": math.inf}
"""Without the check a step raises for zeros and NaN, updates with ones, and lowers a loss scale for infinity."""


def _meet(env, folder):
    """Return when both ranks have come, over no connection of the world."""
    (folder / str(env.rank)).touch()
    while not (folder / str(1 - env.rank)).exists():
        time.sleep(0.01)


def _abort_under(env, folder, module, value, name):
    """Abort the world from another thread when both ranks have reduced in ``module``, and return garbage."""
    reduce = getattr(module, name)

    def lame(tensor, *args, **kwargs):
        result = torch.full_like(reduce(tensor, *args, **kwargs), value)
        _meet(env, folder)
        aborting = threading.Thread(target=world.abort_world)
        aborting.start()
        aborting.join()
        return result

    setattr(module, name, lame)


def _step(env, plan_json, folder, value):
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    before = [block.values.clone() for block in parts.optimizer.blocks()]
    _abort_under(env, folder, step, value, "all_reduce")
    with pytest.raises(CommunicationError, match=r"during a read of the step's totals: its att"):
        step.train_step(parts, TrainState(), Requests(), is_recording=False)
    after = [block.values for block in parts.optimizer.blocks()]
    assert all(map(torch.equal, before, after))


@pytest.mark.sample(2)
@pytest.mark.parametrize("value", GARBAGE.values(), ids=GARBAGE)
def test_a_step_decides_nothing_by_totals_that_an_abort_left(value, tmp_path):
    plan = make_test_plan(*layout_overrides("dp2"), "elastic.on_nan=skip")
    run_grid(_step, plan.grid, plan.to_json(), tmp_path, value)


def _read(env, plan_json, folder, what):
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    reads = {
        "evaluation": (forward_backward, "all_reduce", lambda: forward_backward.evaluate(parts)),
        "replicas": (replica_divergence, "all_gather", lambda: replica_divergence.DivergenceCheck(parts).check(1, is_saving=True)),
        "findings": (nan_locator, "all_gather", lambda: nan_locator._from_all_ranks(None, parts)),
        "norms": (train_statistics, "all_reduce", lambda: train_statistics.norm_metrics(parts, None)),
        "barrier": (collectives, "all_reduce", lambda: collectives.barrier(env.groups.world)),
    }  # fmt: skip
    module, name, read = reads[what]
    _abort_under(env, folder, module, 1.0, name)
    with pytest.raises(CommunicationError, match="the world was aborted during a read of"):
        read()


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["evaluation", "replicas", "findings", "norms", "barrier"])
def test_no_other_number_of_all_ranks_is_believed_either(what, tmp_path):
    options = ["run.eval_samples=4", "elastic.replica_check_every=1"]
    plan = make_test_plan(*layout_overrides("dp2"), *options)
    run_grid(_read, plan.grid, plan.to_json(), tmp_path, what)


def _open_again(env, folder):
    _meet(env, folder)
    world.abort_world("first cause")
    world.abort_world("second cause")
    with pytest.raises(CommunicationError, match="first cause"):
        world.raise_if_aborted("a number")
    world.open_world(
        rank=env.rank, world_size=2, rendezvous="", store=world.file_store(folder / "again", 2), timeout_s=60,
        device=env.device,
    )  # fmt: skip
    world.raise_if_aborted("a number")
    # a rank that closes while the other still connects looks lost to it
    _meet(env, folder / "opened")
    world.close_world()
    world.raise_if_aborted("a number")


def test_the_first_cause_is_told_until_a_new_world_opens(tmp_path):
    plan = make_test_plan(*layout_overrides("dp2"))
    (tmp_path / "opened").mkdir()
    run_grid(_open_again, plan.grid, tmp_path)


class _Copied:
    """An event of a copy that is complete."""

    def synchronize(self):
        pass


def test_a_copy_that_ended_after_an_abort_is_not_saved(monkeypatch):
    copy = HostCopy()
    copy._copied = _Copied()
    copy.wait()
    monkeypatch.setattr(world._world, "cause", "a peer is lost")
    with pytest.raises(CommunicationError, match="a read of the copy of the state: a peer is lost"):
        copy.wait()
