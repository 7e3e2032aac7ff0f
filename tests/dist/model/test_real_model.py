"""Evaluation of a published model, and of a random one on whole files, equals plain loops over transformers.

SmolLM2-135M-Instruct has 9 heads and 3 key-value heads, so tp is 3; a random Llama with 8 heads takes tp 2. The loops know
windows, words and passages by the protocols alone. Everything is float64: transformers keeps norms and RoPE's angles
in float32 otherwise. RAYMEGA_TEST_SETS=FOLDER measures on the published test files, as docs/smollm2.md tells.
"""

import json
from math import exp

import pytest
import torch
from torch.nn.functional import cross_entropy

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.convert.huggingface.importer import hf_import
from raymega.evaluate.requests import Scores, pack_requests, unpack_requests
from raymega.evaluate.run import EvalOptions, plan_of
from raymega.evaluate.tasks.lambada import lambada
from raymega.evaluate.tasks.task import Settings
from raymega.evaluate.tasks.wikitext import detokenise, wikitext
from raymega.evaluate.tokenizer import find_tokenizer
from raymega.evaluate.worker import score_requests
from raymega.plan.run_plan import read_plan
from raymega.train.build_scorer import build_scorer, load_weights
from tests.support import smollm2
from tests.support.ranks import run_grid
from tests.support.references import hf_models

pytestmark = [pytest.mark.dist, pytest.mark.wide, pytest.mark.timeout(7200)]
NOW = "2025-01-01T00:00:00+00:00"
LIMIT = 1e-6
STRIDE = 32
SEQ_LEN = 256
WINDOW = 128
GRIDS = {
    "one rank": "",
    "tp3": "tp=3",
    "pp2": "pp=2",
    "cp2 ring": "cp=2,cp_method=ring",
    "pp2 dp2": "pp=2,dp=2",
    "dp3": "dp=3",
}
OF_8_HEADS = {
    "one rank": "",
    "tp2": "tp=2",
    "tp2 pp2": "tp=2,pp=2",
    "tp2 cp2": "tp=2,cp=2,cp_method=ring",
}
TIMEOUT_S = 3600.0
NUM_PUBLISHED = 40, 200
"""Windows and passages of the published test files that SmolLM2 is measured on."""


class Subject:
    """A model that is measured: its checkpoint, the tasks' questions, and what plain loops say."""

    def __init__(self, model, uri, files, tokenizer, *, limits, batch_size):
        self.uri, self.batch_size = uri, batch_size
        windows, passages = (
            Settings(seq_len=n, stride=STRIDE, limit=m)
            for n, m in zip((WINDOW, SEQ_LEN), limits, strict=True)
        )
        self.text = wikitext(files[0], tokenizer, windows)
        self.words = lambada(files[1], tokenizer, passages)
        raw, lines = (file.read_text(encoding="utf-8") for file in files)
        with hf_models.in_float64(model), torch.no_grad():
            self.wanted = {
                **plain_wikitext(model, raw, tokenizer.ids, limits[0], batch_size=batch_size),
                **plain_lambada(model, lines, tokenizer.ids, limits[1]),
            }

    def requests(self):
        """The windows, and of each passage the strict form, as the loose one asks for less of the same."""
        return [*self.text.requests, *self.words.requests[::2]]

    def metrics(self, log_probs, is_greedy):
        scores = [
            Scores(log_probs=a, is_greedy=b) for a, b in zip(log_probs, is_greedy, strict=True)
        ]
        num_windows = len(self.text.requests)
        of_text, _ = self.text.judge(scores[:num_windows])
        of_words, samples = self.words.judge(
            [each for each in scores[num_windows:] for _ in range(2)]
        )
        names = ("loss", "word_perplexity", "accuracy", "target_perplexity")
        return {name: (of_text | of_words)[name] for name in names}, [
            each["is_right"] for each in samples
        ]

    def on(self, grid):
        requests = pack_requests(self.requests())
        overrides = ("precision.dtype=float64", f"schedule.micro_batch_size={self.batch_size}")
        options = EvalOptions(grid=grid, overrides=overrides, seq_len=SEQ_LEN)
        plan = plan_of(open_checkpoint(self.uri).manifest, options)
        return run_grid(_score, plan.grid, plan.to_json(), self.uri, requests, timeout=TIMEOUT_S)


def plain_wikitext(model, raw, ids_of, limit, *, batch_size):
    """Megatron-LM's perplexity of overlapping windows; of the first ``limit`` of them unless it is 0."""
    ids, num_words = ids_of(detokenise(raw)), len(raw.strip().split(" "))
    number = 1 + max(0, -(-(len(ids) - 1 - WINDOW) // STRIDE))
    starts = [STRIDE * each for each in range(min(number, limit or number))]
    parts = [torch.tensor(ids[start : start + WINDOW + 1]) for start in starts]
    total, count = 0.0, 0
    for group in [
        parts[:1],
        *(parts[n : n + batch_size] for n in range(1, len(parts), batch_size)),
    ]:
        for batch in (
            [torch.stack(group)] if len({*map(len, group)}) == 1 else [part[None] for part in group]
        ):
            losses = cross_entropy(
                model(batch[:, :-1]).logits.transpose(1, 2), batch[:, 1:], reduction="none"
            )
            counted = losses if count == 0 else losses[:, WINDOW - STRIDE :]
            total, count = total + float(counted.sum()), count + counted.numel()
    loss = total / count
    return {"loss": loss, "word_perplexity": exp(loss * (len(ids) - 1) / (num_words - 1))}


def plain_lambada(model, lines, ids_of, limit):
    """Whether each token of a passage's last word is the likeliest, and exp of the mean of -log p of the words."""
    right, total = [], 0.0
    for line in lines.splitlines()[: limit or None]:
        text = json.loads(line)["text"]
        word = text.split()[-1]
        before, target = ids_of(text[: text.rfind(word)].strip()), ids_of(f" {word}")
        inputs = torch.tensor([*before, *target])[:-1][-SEQ_LEN:]
        logits = model(inputs[None], logits_to_keep=len(target)).logits[0]
        target = torch.tensor(target)
        total -= float(logits.log_softmax(-1).gather(-1, target[:, None]).sum())
        right.append(bool((logits.argmax(-1) == target).all()))
    accuracy = sum(right) / len(right)
    return {"right": right, "accuracy": accuracy, "target_perplexity": exp(total / len(right))}


def _score(env, plan_json, uri, requests):
    plan = read_plan(plan_json)
    scorer = build_scorer(plan, rank=env.rank, groups=env.groups, device=env.device)
    load_weights(scorer, open_checkpoint(uri), env.groups)

    def score(part):
        return score_requests(plan, scorer, env.groups, part, device=env.device)

    every = unpack_requests(requests)
    few = [every[0], *every[-2:]]
    return score(every), score(few), score(few)


def _check(subject, grid):
    for scores, few, again in subject.on(grid):
        found, right = subject.metrics(*scores)
        wanted = {name: subject.wanted[name] for name in found}
        assert found == pytest.approx(wanted, rel=LIMIT, abs=0)
        assert right == subject.wanted["right"]
        assert [a.tobytes() for a in few[0]] == [a.tobytes() for a in again[0]], "not its own bits"
    print(grid or "one rank", {name: (value, wanted[name]) for name, value in found.items()})


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2.write_model(folder / "hf")
    hf_import(folder / "hf", str(folder / "native"), created=NOW)
    model = hf_models.load_model(folder / "hf").double()
    uri, files = str(folder / "native"), smollm2.text_files(folder)
    limits = NUM_PUBLISHED if smollm2.has_test_sets() else (3, 5)
    tokenizer = find_tokenizer(open_checkpoint(uri))
    return Subject(model, uri, files, tokenizer, limits=limits, batch_size=1)


@pytest.mark.real_model
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_a_published_model_scores_as_in_a_plain_loop(grid, published):
    _check(published, grid)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    eod_id = None

    def ids(self, text):
        return list(text.encode())


@pytest.fixture(scope="module")
def of_8_heads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    model = hf_models.make_model("llama3", max_position_embeddings=SEQ_LEN)
    model.save_pretrained(folder / "hf")
    hf_import(folder / "hf", str(folder / "native"), created=NOW, make_vocab_size_divisible_by=8)
    uri, files = str(folder / "native"), smollm2.text_files(folder)
    limits = (0, 0) if smollm2.has_test_sets() else (400, 60)
    return Subject(model, uri, files, Bytes(), limits=limits, batch_size=16)


@pytest.mark.parametrize("grid", OF_8_HEADS.values(), ids=OF_8_HEADS)
def test_a_random_model_scores_whole_files_as_in_a_plain_loop(grid, of_8_heads):
    _check(of_8_heads, grid)
