"""`raymega eval` on Ray: a random model of transformers on two tensor-parallel ranks."""

import json
import subprocess
import sys

import pytest
import torch

from raymega.convert.huggingface.importer import hf_import
from raymega.prepare.tokenizer.trained import byte_tokenizer
from tests.support.references import hf_models

pytestmark = pytest.mark.ray
NOW = "2025-01-01T00:00:00+00:00"
TEXTS = ["the cat sat on a mat", "she said that he had a hat", "a b c"]


def _eval(*words):
    command = [sys.executable, "-m", "raymega", "eval", *words, "--address", "local", "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    model = hf_models.make_model("llama2")
    model.save_pretrained(folder / "theirs")
    (folder / "theirs" / "tokenizer.json").write_text(byte_tokenizer())
    hf_import(folder / "theirs", str(folder / "ours"), created=NOW, make_vocab_size_divisible_by=8)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "texts.jsonl").write_text(lines)
    return folder, model


def _log_probs_of_last_words(model):
    found = []
    for text in TEXTS:
        word = " " + text.split()[-1]
        tokens = torch.tensor([list(text.encode())])
        with torch.no_grad():
            rows = hf_models.logits(model, tokens[:, :-1])[0].log_softmax(-1)
        picked = rows.gather(-1, tokens[0, 1:, None])[:, 0]
        found.append(float(picked[-len(word.encode()) :].sum()))
    return found


def test_a_task_on_a_grid_scores_as_transformers(folder, tmp_path):
    place, model = folder
    samples = tmp_path / "samples.jsonl"
    done = _eval(
        str(place / "ours"), "--task", "lambada", "--data", str(place / "texts.jsonl"),
        "--grid", "tp=2", "--samples", str(samples),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["documents"] == 3 and told["grid"]["tp"] == 2 and told["step"] == 0
    records = [json.loads(line) for line in samples.read_text().splitlines()]
    wanted = _log_probs_of_last_words(model)
    assert [r["log_prob"] for r in records] == pytest.approx(wanted, rel=1e-10)
    assert [r["target"] for r in records] == ["mat", "hat", "c"]
