"""Generated text equals transformers', on any grid, greedy and drawn; samples in a run change nothing."""

from dataclasses import replace

import pytest
import torch

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.convert.huggingface.importer import hf_import
from raymega.generate.answers import unpack_task
from raymega.generate.prompts import Prompts
from raymega.generate.run import GenerateOptions, prepare_generation
from raymega.generate.worker import continue_prompts
from raymega.plan.run_plan import read_plan
from raymega.plan.sampling import Sampling
from raymega.prepare.tokenizer.trained import byte_tokenizer
from raymega.train.build_scorer import build_scorer, load_weights
from tests.support.ranks import run_grid
from tests.support.references import hf_models

pytestmark = pytest.mark.dist
NOW = "2025-01-01T00:00:00+00:00"
TEXTS = ("the cat", "a", "she said that he", "no", "1 2 3 4 5 6")
GRIDS = {
    "one rank": "tp=1",
    "tp2": "tp=2",
    "pp2": "pp=2",
    "cp2": "cp=2",
    "dp2": "dp=2",
    "tp2 sp pp2": "tp=2,sequence_parallel=true,pp=2",
    "cp2 all-to-all dp2": "cp=2,cp_method=all_to_all,dp=2",
}
DRAWN = Sampling(max_tokens=12, temperature=1.3, top_k=100, top_p=0.9, seed=7)


def _imported(tmp_path, kind, *, positions=40):
    model = hf_models.make_model(kind, positions=positions)
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text(byte_tokenizer())
    hf_import(
        tmp_path / "theirs", str(tmp_path / "ours"), created=NOW, make_vocab_size_divisible_by=8
    )
    return model, str(tmp_path / "ours")


def _plain(model, sampling):
    """Transformers' own greedy text, one prompt after the other: no padding, no code of ours."""
    answers = []
    for text in TEXTS:
        prompt = torch.tensor([list(text.encode())])
        with torch.no_grad(), hf_models.in_float64(model):
            output = model.generate(
                prompt, do_sample=False, max_new_tokens=sampling.max_tokens, pad_token_id=0
            )
        answers.append(output[0, prompt.shape[1] :].tolist())
    return answers


def _ready(uri, sampling, grid=""):
    options = GenerateOptions(sampling=sampling, grid=grid, batch_size=3)
    return prepare_generation(uri, Prompts(texts=TEXTS), options)


def _rank(env, plan_json, uri, task):
    plan = read_plan(plan_json)
    scorer = build_scorer(plan, rank=env.rank, groups=env.groups, device=env.device)
    load_weights(scorer, open_checkpoint(uri), env.groups)
    return continue_prompts(plan, scorer, env.groups, unpack_task(task), device=env.device)


def _on(uri, sampling, grid):
    ready = _ready(uri, sampling, grid)
    return run_grid(_rank, ready.plan.grid, ready.plan.to_json(), uri, ready.task.pack())


def _with_transformers(uri, sampling):
    return [list(answer.tokens) for answer in _ready(uri, sampling).run("", lambda *_: None)]


def _check_greedy(kind, tmp_path, sampling):
    """Left-padded ragged batches, and full recompute of ragged rows, give the text of each prompt alone."""
    model, uri = _imported(tmp_path, kind, positions=96)
    wanted = _plain(model, sampling)
    assert _with_transformers(uri, sampling) == wanted
    assert _on(uri, sampling, "tp=1") == [wanted]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [*hf_models.KINDS, *hf_models.EXPERTS])
def test_greedy_text_is_that_of_transformers(kind, tmp_path):
    _check_greedy(kind, tmp_path, Sampling(max_tokens=6))


@pytest.mark.wide
@pytest.mark.parametrize("kind", [*hf_models.KINDS, *hf_models.EXPERTS])
def test_greedy_text_of_64_tokens_is_that_of_transformers(kind, tmp_path):
    _check_greedy(kind, tmp_path, Sampling(max_tokens=64))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    _, uri = _imported(tmp_path_factory.mktemp("llama"), "llama3")
    return uri, _with_transformers(uri, DRAWN)


@pytest.mark.sample(1)
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_drawn_text_of_a_seed_is_the_same_on_every_grid(grid, llama):
    uri, wanted = llama
    results = _on(uri, DRAWN, grid)
    assert all(result == wanted for result in results)
    assert len({tuple(answer) for answer in wanted}) == len(TEXTS)


def test_answers_end_where_the_model_does_and_drawn_ones_differ_by_seed(llama):
    uri, wanted = llama
    assert _with_transformers(uri, replace(DRAWN, seed=8)) != wanted
    # 40 positions: a prompt of 16 tokens leaves room for 24
    answers = _ready(uri, Sampling(max_tokens=99)).run("", lambda *_: None)
    for text, answer in zip(TEXTS, answers, strict=True):
        is_whole = len(text) + len(answer.tokens) == 40
        assert is_whole == (answer.finish_reason == "length")
