"""Evaluation of a published model, and of a random one on whole files, equals plain loops over transformers.

SmolLM2-135M-Instruct has 9 heads and 3 key-value heads, so tp is 3; a random Llama with 8 heads takes tp 2. Both sides are
float64 throughout: in float32 a passage's log-probability is rounded at 1e-5, more than the limit.
RAYMEGA_TEST_SETS=FOLDER measures on the published test files, as docs/smollm2.md tells.
"""

import hashlib
import json

import pytest

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.convert.huggingface.importer import hf_import
from raymega.evaluate.requests import Scores, pack_requests, unpack_requests
from raymega.evaluate.run import EvalOptions, plan_of
from raymega.evaluate.tasks.lambada import lambada
from raymega.evaluate.tasks.task import Settings
from raymega.evaluate.tasks.wikitext import wikitext
from raymega.evaluate.tokenizer import find_tokenizer
from raymega.evaluate.worker import score_requests
from raymega.plan.run_plan import read_plan
from raymega.train.build_scorer import build_scorer, load_weights
from tests.support import plain_loops, smollm2
from tests.support.ranks import run_grid
from tests.support.references import hf_models

pytestmark = [pytest.mark.dist, pytest.mark.wide, pytest.mark.timeout(7200)]
NOW = "2025-01-01T00:00:00+00:00"
LIMIT = 1e-6
STRIDE = 32
SEQ_LEN = 512
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
LONG_WINDOW = 8192
OF_LONG_WINDOWS = {"one rank": "", "tp2": "tp=2", "cp2": "cp=2,cp_method=ring"}
TIMEOUT_S = 3600.0
NUM_PUBLISHED = 40, 200
"""Windows and passages of the published test files that SmolLM2 is measured on."""


class Subject:
    """A model that is measured: its checkpoint, the tasks' questions, and what plain loops say."""

    def __init__(
        self, folder, files, tokenizer, *, limits, batch_size, window=WINDOW, seq_len=SEQ_LEN
    ):
        self.uri, self.batch_size, self.seq_len = str(folder / "native"), batch_size, seq_len
        windows, passages = (
            Settings(seq_len=n, stride=STRIDE, limit=m)
            for n, m in zip((window, seq_len), limits, strict=True)
        )
        self.text = wikitext(files[0], tokenizer, windows)
        self.words = lambada(files[1], tokenizer, passages)
        self.wanted = plain_loops.both(
            folder / "hf",
            files,
            tokenizer.ids,
            limits=limits,
            window=window,
            stride=STRIDE,
            seq_len=seq_len,
            batch_size=batch_size,
        )

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
        options = EvalOptions(grid=grid, overrides=overrides, seq_len=self.seq_len)
        plan = plan_of(open_checkpoint(self.uri), options)
        return run_grid(_score, plan.grid, plan.to_json(), self.uri, requests, timeout=TIMEOUT_S)


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
    digest = hashlib.sha256(b"".join(each.tobytes() for each in scores[0])).hexdigest()
    print(json.dumps({"grid": grid, "bits": digest[:16], "found": found, "plain loop": wanted}))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2.write_model(folder / "hf")
    hf_import(folder / "hf", str(folder / "native"), created=NOW)
    limits = NUM_PUBLISHED if smollm2.has_test_sets() else (3, 5)
    tokenizer = find_tokenizer(open_checkpoint(str(folder / "native")))
    files = smollm2.text_files(folder)
    return Subject(folder, files, tokenizer, limits=limits, batch_size=1)


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
    files = smollm2.text_files(folder)
    limits = (0, 0) if smollm2.has_test_sets() else (400, 60)
    return Subject(folder, files, Bytes(), limits=limits, batch_size=16)


@pytest.mark.parametrize("grid", OF_8_HEADS.values(), ids=OF_8_HEADS)
def test_a_random_model_scores_whole_files_as_in_a_plain_loop(grid, of_8_heads):
    _check(of_8_heads, grid)


@pytest.fixture(scope="module")
def of_long_windows(tmp_path_factory):
    """A random model of 8,192 positions, and the first windows of as many tokens."""
    folder = tmp_path_factory.mktemp("long")
    model = hf_models.make_model("llama3", max_position_embeddings=LONG_WINDOW)
    model.save_pretrained(folder / "hf")
    hf_import(folder / "hf", str(folder / "native"), created=NOW, make_vocab_size_divisible_by=8)
    return Subject(
        folder,
        smollm2.text_files(folder),
        Bytes(),
        limits=(3, 2),
        batch_size=1,
        window=LONG_WINDOW,
        seq_len=LONG_WINDOW,
    )


@pytest.mark.parametrize("grid", OF_LONG_WINDOWS.values(), ids=OF_LONG_WINDOWS)
def test_windows_of_8192_tokens_score_as_in_a_plain_loop(grid, of_long_windows):
    lengths = [len(each.tokens) - 1 for each in of_long_windows.text.requests]
    assert lengths == [LONG_WINDOW] * 3
    _check(of_long_windows, grid)
