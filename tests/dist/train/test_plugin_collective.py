"""A callback that calls a collective on one rank only ends by the time-out, with its name and line."""

import pytest

from raymega.api import load_job
from raymega.errors import CommunicationError
from raymega.parallel.comm.collectives import all_reduce
from raymega.plan.grid import Grid
from raymega.plan.run_plan import make_plan
from raymega.plugins import Plugin
from raymega.train.plugin_hooks import PluginHooks
from tests.support.jobs import VERIFY
from tests.support.ranks import run_grid

CALLBACK = Plugin(kind="callback", name="tests.lonely", target=f"{__name__}:Lonely")


class Lonely:
    """A callback whose rank 0 waits for the others in vain."""

    def __init__(self, setup):
        self.setup = setup

    def step_begins(self, step):
        import torch

        if self.setup.rank == 0:
            all_reduce(torch.ones(2), self.setup.world)

    def step_ends(self, *_):
        pass

    evaluation_ends = checkpoint_begins = step_ends


PLUGINS = (CALLBACK,)


def begin_step(env):
    job = load_job(VERIFY, [f"plugins.modules=[{__name__}]", "plugins.callbacks=[tests.lonely]"])
    hooks = PluginHooks(make_plan(job), env.groups.world)
    try:
        hooks.step_begins(1)
    except CommunicationError as error:
        return str(error)
    return ""


@pytest.mark.wide
def test_collective_on_one_rank_only_is_told_with_the_plugin_s_name():
    told, silent = run_grid(begin_step, Grid(dp=2), collective_timeout_s=60.0)
    assert silent == ""
    assert (
        "it was raised in callback tests.lonely at " in told
        and "test_plugin_collective.py:" in told
    )
