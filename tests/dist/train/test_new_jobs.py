"""What `raymega init` writes trains: a job from scratch, and one that continues a model of Hugging Face."""

import pytest

from raymega.cli.init.new_job import Answers, new_job
from raymega.cli.init.recipes import RECIPES
from raymega.config.load import parse_job
from raymega.convert.huggingface.importer import hf_import
from raymega.messages import Requests
from raymega.plan.run_plan import make_plan, read_plan
from raymega.train.build import build_parts
from raymega.train.entry import init_from
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.ranks import run_grid
from tests.unit.convert.folders import NOW, make_model, write_folder

pytestmark = pytest.mark.dist
STEPS = 2


def _train(env, plan_json):
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    init_from(parts, plan.job.checkpoint)
    state, losses = TrainState(), []
    for _ in range(STEPS):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        losses.append(outcome.loss)
    return losses


@pytest.mark.wide
@pytest.mark.parametrize("recipe", ["pretrain", "continue", "sft", "lora"])
def test_a_new_job_trains(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "theirs", make_model(num_heads=8, num_kv_heads=4, max_positions=32))
    hf_import(tmp_path / "theirs", "theirs-raymega", created=NOW)
    made = new_job(Answers(recipe=recipe, model="theirs", out=tmp_path / "new.yaml"))
    (tmp_path / "new.yaml").write_text(made.text)
    plan = make_plan(parse_job("new.yaml").job())
    is_continued = plan.job.checkpoint.init_from != "none"
    assert is_continued is RECIPES[recipe].needs_model
    for losses in run_grid(_train, plan.grid, plan.to_json()):
        assert len(losses) == STEPS and all(0 < loss < 10 for loss in losses)
