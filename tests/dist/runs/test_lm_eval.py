"""The model `raymega` of lm-eval against lm-eval's own Hugging Face model on the exported weights, in float64."""

import json
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.convert.huggingface.importer import hf_import
from raymega.data.tokenizer_files import encode_settings, loading_settings
from raymega.errors import ConfigError
from raymega.evaluate.requests import Scores
from raymega.evaluate.run import EvalOptions, prepare_evaluation
from raymega.evaluate.worker import score_requests
from raymega.plan.run_plan import read_plan
from raymega.prepare.tokenizer.trained import END_OF_DOCUMENT, byte_tokenizer
from raymega.train.build_scorer import build_scorer, load_weights
from tests.support.ranks import run_grid
from tests.support.references import hf_models

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytestmark = [pytest.mark.dist, pytest.mark.wide]
NOW = "2025-01-01T00:00:00+00:00"
LIMIT = 1e-9
TIMEOUT_S = 3600.0
"""A guard only: a published model takes minutes."""
PASSAGES = ["the cat sat on a mat", "she said that he had a hat", "no", "and a third one was there"]
PAIRS = [
    ("the cat sat on", " a mat"),
    ("", "no context at all"),
    ("blanks belong to what follows  ", "them"),
    ("a context that is much longer than the model reads at once " * 3, "end"),
    ("x", "y"),
]
TEXTS = [
    "short",
    "a text of more than the forty tokens that the model reads at once, twice over " * 2,
]
LAMBADA = """
task: last_words
dataset_path: json
output_type: loglikelihood
test_split: test
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' '+text.split(' ')[-1]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
"""
CHOICES = """
task: endings
dataset_path: json
output_type: multiple_choice
test_split: test
doc_to_text: "{{before}}"
doc_to_choice: "{{endings}}"
doc_to_target: right
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def _score(env, plan_json, uri, requests):
    plan = read_plan(plan_json)
    scorer = build_scorer(plan, rank=env.rank, groups=env.groups, device=env.device)
    load_weights(scorer, open_checkpoint(uri), env.groups)
    return score_requests(plan, scorer, env.groups, requests, device=env.device)


def _on_ranks(checkpoint, plan, requests, *, on_rows):
    uri = f"{checkpoint.store.uri}/{checkpoint.manifest.key}"
    log_probs, is_greedy = run_grid(
        _score, plan.grid, plan.to_json(), uri, requests, timeout=TIMEOUT_S
    )[0]
    on_rows(1, 1)
    return [Scores(log_probs=a, is_greedy=b) for a, b in zip(log_probs, is_greedy, strict=True)]


@pytest.fixture
def scored_by_ranks(monkeypatch):
    """Processes of this machine in place of a Ray cluster."""
    from raymega.evaluate.harness import adapter

    monkeypatch.setattr(adapter, "score", _on_ranks)
    monkeypatch.setattr(adapter, "session_at", lambda _address: nullcontext())


def _models(folder, kind, grid=""):
    """The same random model: lm-eval's Hugging Face model, and the URI of raymega's checkpoint."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    model = hf_models.make_model(kind)
    model.save_pretrained(folder / "theirs")
    settings = loading_settings({}, eod=END_OF_DOCUMENT, bos="")
    (folder / "theirs" / "tokenizer_config.json").write_bytes(encode_settings(settings))
    (folder / "theirs" / "tokenizer.json").write_text(byte_tokenizer())
    uri = str(folder / "ours")
    hf_import(folder / "theirs", uri, created=NOW, make_vocab_size_divisible_by=8)
    theirs = HFLM(
        pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder / "theirs"), batch_size=3
    )
    return model, theirs, uri


def _instances(arguments):
    return [SimpleNamespace(args=each) for each in arguments]


@pytest.mark.parametrize("kind", [*hf_models.KINDS, *hf_models.EXPERTS])
def test_log_likelihoods_are_those_of_the_hugging_face_model(kind, tmp_path, scored_by_ranks):
    _compare(tmp_path, kind, "")


def test_log_likelihoods_are_the_same_on_a_grid(tmp_path, scored_by_ranks):
    _compare(tmp_path, "llama3", "tp2-pp2")


def _compare(folder, kind, grid):
    from raymega.evaluate.harness.adapter import RaymegaLM

    model, theirs, uri = _models(folder, kind)
    ours = RaymegaLM.create_from_arg_string(f"checkpoint={uri},grid={grid}", {"batch_size": 3})
    with hf_models.in_float64(model):
        wanted = theirs.loglikelihood(_instances(PAIRS), disable_tqdm=True)
        rolling = theirs.loglikelihood_rolling(_instances([(t,) for t in TEXTS]), disable_tqdm=True)
    found = ours.loglikelihood(_instances(PAIRS), disable_tqdm=True)
    np.testing.assert_allclose([a for a, _ in found], [a for a, _ in wanted], rtol=LIMIT)
    assert [b for _, b in found] == [b for _, b in wanted]
    mine = ours.loglikelihood_rolling(_instances([(t,) for t in TEXTS]), disable_tqdm=True)
    np.testing.assert_allclose(mine, rolling, rtol=LIMIT)


def test_generated_text_is_that_of_the_hugging_face_model(tmp_path, scored_by_ranks):
    from raymega.evaluate.harness.adapter import RaymegaLM

    _, theirs, uri = _models(tmp_path, "llama3")
    asked = [(text, {"until": ["zz"], "max_gen_toks": 8}) for text in PASSAGES]
    ours = RaymegaLM.create_from_arg_string(f"checkpoint={uri}", {"batch_size": 3})
    found = ours.generate_until(_instances(asked), disable_tqdm=True)
    assert found == theirs.generate_until(_instances(asked), disable_tqdm=True)
    assert all(found)


@pytest.mark.parametrize("text", [LAMBADA, CHOICES], ids=["last words", "four options"])
def test_a_yaml_task_has_the_metrics_that_it_has_in_lm_eval(text, tmp_path, scored_by_ranks):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    model, theirs, uri = _models(tmp_path, "qwen2")
    docs = [
        {"text": t, "before": t[:-2], "endings": [" a", t[-2:], " of it", "?"], "right": 1}
        for t in PASSAGES
    ]
    data, file = tmp_path / "docs.jsonl", tmp_path / "task.yaml"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    file.write_text(text)
    report = prepare_evaluation(uri, str(file), data, EvalOptions(limit=3)).run(lambda *_: None)
    # the same file, by lm-eval alone
    file.write_text(f"{text}dataset_kwargs: {{data_files: {{test: {data}}}}}\n")
    with hf_models.in_float64(model):
        wanted = simple_evaluate(
            model=theirs, tasks=[str(file)], limit=3, bootstrap_iters=1000,
            task_manager=TaskManager(include_defaults=False),
        )  # fmt: skip
    ((name, values),) = wanted["results"].items()
    for metric, value in report.metrics.items():
        assert value == pytest.approx(values[f"{metric},none"], rel=LIMIT)
    assert (report.task, report.documents, set(report.metrics) >= {"acc"}) == (name, 3, True)
    for mine, other in zip(report.samples, wanted["samples"][name], strict=True):
        assert np.allclose(mine["filtered_resps"], other["filtered_resps"], rtol=LIMIT)
    assert "--limit 3" in report.notes[1] and report.tokens > 0


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        ("task: [", EvalOptions(), "it is a YAML file of one task"),
        ("task: a\ndataset_path: json\n", EvalOptions(), "it is a YAML file of one task"),
        (CHOICES, EvalOptions(stride=8), "leave --stride out"),
    ],
)
def test_a_wrong_yaml_task_is_refused_before_anything_starts(text, options, told, tmp_path):
    _, _, uri = _models(tmp_path, "qwen2")
    (tmp_path / "task.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        prepare_evaluation(uri, str(tmp_path / "task.yaml"), None, options)
    assert told in str(error.value)
    with pytest.raises(ConfigError) as error:
        prepare_evaluation(uri, str(tmp_path / "no.yaml"), None, options)
    assert "no.yaml is no file" in str(error.value)


def test_the_command_lm_eval_knows_the_model(tmp_path):
    words = [
        "--model",
        "raymega",
        "--model_args",
        f"checkpoint={tmp_path}/none",
        "--tasks",
        "x.yaml",
    ]
    (tmp_path / "x.yaml").write_text(LAMBADA)
    done = subprocess.run(
        [sys.executable, "-m", "raymega.evaluate.harness.command", *words],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-2000:]
    assert "ConfigError" in done.stderr and "none" in done.stderr.splitlines()[-1]
