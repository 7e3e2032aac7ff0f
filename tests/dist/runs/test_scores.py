"""Scores of an evaluation on grids equal a plain loop over transformers' logits, and repeat bit for bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.convert.huggingface.importer import hf_import
from raymega.errors import ConfigError
from raymega.evaluate.requests import Request, rows_on_grid
from raymega.evaluate.run import EvalOptions, plan_of, prepare_evaluation
from raymega.evaluate.worker import score_requests
from raymega.plan.run_plan import read_plan
from raymega.prepare.tokenizer.trained import byte_tokenizer
from raymega.train.build_scorer import build_scorer, load_weights
from tests.support.ranks import run_grid
from tests.support.references import hf_models
from tests.support.references.peft_models import adapted

pytestmark = pytest.mark.dist
NOW = "2025-01-01T00:00:00+00:00"
LIMIT = 1e-10
GRIDS = {
    "one rank": "",
    "tp2 pp2": "tp=2,pp=2",
    "tp2 sp": "tp=2,sequence_parallel=true",
    "cp2": "cp=2",
    "cp2 all-to-all": "cp=2,cp_method=all_to_all",
    "pp2 dp2": "pp=2,dp=2",
    "dp3": "dp=3",
}


def _requests():
    """Ragged requests: more than a micro-batch of rows, one of two tokens, one as long as a row."""
    rng = np.random.default_rng(0)
    lengths = [2, 41, *rng.integers(3, 30, 24).tolist()]
    return [
        Request(tokens=rng.integers(0, 259, n), num_targets=int(rng.integers(1, n)))
        for n in lengths
    ]


def _score(env, plan_json, uri, few=None):
    plan = read_plan(plan_json)
    scorer = build_scorer(plan, rank=env.rank, groups=env.groups, device=env.device)
    load_weights(scorer, open_checkpoint(uri), env.groups)
    return score_requests(plan, scorer, env.groups, _requests()[:few], device=env.device)


def _imported(tmp_path, kind, **fields):
    model = hf_models.make_model(kind, **fields)
    model.save_pretrained(tmp_path / "theirs")
    hf_import(
        tmp_path / "theirs", str(tmp_path / "ours"), created=NOW, make_vocab_size_divisible_by=8
    )
    return model, str(tmp_path / "ours")


def _theirs(model):
    """The log-probabilities and greedy matches of transformers, one request after the other."""
    found = []
    with torch.no_grad():
        for request in _requests():
            tokens = torch.from_numpy(request.tokens)[None]
            logits = hf_models.logits(model, tokens[:, :-1])[0]
            targets = tokens[0, 1:]
            log_probs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
            is_greedy = logits.argmax(-1) == targets
            found.append((log_probs[-request.num_targets :], is_greedy[-request.num_targets :]))
    return found


def _compare(results, wanted):
    for log_probs, is_greedy in results:
        for ours, greedy, (theirs, theirs_greedy) in zip(log_probs, is_greedy, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=LIMIT, atol=LIMIT)
            assert (greedy == theirs_greedy.numpy()).all()


def _on(uri, grid):
    plan = plan_of(open_checkpoint(uri), EvalOptions(grid=grid, seq_len=40))
    return run_grid(_score, plan.grid, plan.to_json(), uri)


def _few_on(uri, grid, few, *, seq_len):
    plan = plan_of(open_checkpoint(uri), EvalOptions(grid=grid, seq_len=seq_len))
    assert rows_on_grid(_requests()[:few], plan).seq_len < seq_len
    return run_grid(_score, plan.grid, plan.to_json(), uri, few)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [*hf_models.KINDS, *hf_models.EXPERTS])
def test_one_rank_scores_as_transformers(kind, tmp_path):
    model, uri = _imported(tmp_path, kind)
    _compare(_on(uri, ""), _theirs(model))


@pytest.mark.sample(1)
@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_adapters_score_live_as_in_peft(grid, use_dora, tmp_path):
    model, done = adapted("llama3", tmp_path, use_dora=use_dora)
    _compare(_on(done.uri, grid), _theirs(model.base_model.model))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model, uri = _imported(tmp_path_factory.mktemp("llama"), "llama3")
    return uri, _theirs(model)


@pytest.mark.sample(2)
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_every_grid_scores_as_transformers_and_repeats_its_bits(grid, llama):
    uri, wanted = llama
    results = _on(uri, grid)
    _compare(results, wanted)
    again = _on(uri, grid)
    for (ours, _), (theirs, _) in zip(results, again, strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_few_requests_in_a_short_row_score_as_transformers(grid, tmp_path):
    model, uri = _imported(tmp_path, "llama3", max_position_embeddings=256)
    _compare(_few_on(uri, grid, 2, seq_len=256), _theirs(model)[:2])


@pytest.mark.parametrize(
    ("task", "file", "options", "told"),
    [
        ("squad", "texts", EvalOptions(), "a task is one of wikitext, lambada"),
        ("lambada", "texts", EvalOptions(grid="tp=3"), "parallel.tp=3"),
        ("lambada", "texts", EvalOptions(grid="tp"), "--grid tp; it must be pairs"),
        ("wikitext", "texts", EvalOptions(stride=99), "a window has 40 tokens"),
        ("race", "texts", EvalOptions(), "is not in RACE's form"),
        ("lambada", "nothing", EvalOptions(), "does not exist"),
        ("lambada", "empty", EvalOptions(), "has nothing to evaluate"),
        ("lambada", "texts", EvalOptions(tokenizer=Path("no")), "it must be a tokenizer.json"),
        ("lambada", "texts", EvalOptions(tokenizer=None), "has no tokenizer, and neither"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(
    task, file, options, told, llama, tmp_path
):
    uri, _ = llama
    (tmp_path / "texts").write_text('{"text": "a b"}\n')
    (tmp_path / "empty").write_text("")
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer())
    if told != "has no tokenizer, and neither" and options.tokenizer is None:
        options = replace(options, tokenizer=tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError) as error:
        prepare_evaluation(uri, task, tmp_path / file, options)
    assert told in str(error.value)
