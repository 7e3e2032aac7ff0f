"""Planted mistakes that make a number of an evaluation silently wrong, and which number each of them changes.

`tests.mutations.outcomes` calls `outcome` with each of them planted.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, isclose
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TaskMutation:
    """A row: ``old`` in the package's ``file`` becomes ``new``; ``caught`` is what is wrong then."""

    name: str
    file: str
    old: str
    new: str
    caught: str


TASKS = "evaluate/tasks"
TASK_MUTATIONS = (
    TaskMutation(
        name="words are counted after detokenising",
        file=f"{TASKS}/wikitext.py",
        old='num_words = len(raw.strip().split(" "))',
        new='num_words = len(detokenise(raw).strip().split(" "))',
        caught="wikitext: word perplexity",
    ),
    TaskMutation(
        name="the first token counts in the word perplexity",
        file=f"{TASKS}/wikitext.py",
        old="perplexity_of(loss * (len(tokens) - 1) / (num_words - 1))",
        new="perplexity_of(loss * len(tokens) / num_words)",
        caught="wikitext: word perplexity",
    ),
    TaskMutation(
        name="later windows have less context",
        file=f"{TASKS}/windows.py",
        old="begin = done + stride - seq_len",
        new="begin = done - 1",
        caught="windows: context",
    ),
    TaskMutation(
        name="later windows score all their tokens",
        file=f"{TASKS}/windows.py",
        old="num_targets=end - done))",
        new="num_targets=end - begin))",
        caught="windows: tokens scored",
    ),
    TaskMutation(
        name="one token of the last word is enough",
        file=f"{TASKS}/lambada.py",
        old="bool(each.is_greedy.all()) for each in strict)",
        new="bool(each.is_greedy.any()) for each in strict)",
        caught="lambada: accuracy",
    ),
    TaskMutation(
        name="strict and loose are exchanged",
        file=f"{TASKS}/lambada.py",
        old="strict, loose = scores[::2], scores[1::2]",
        new="loose, strict = scores[::2], scores[1::2]",
        caught="lambada: accuracy",
    ),
    TaskMutation(
        name="the likeliest option is the one with the most a byte",
        file=f"{TASKS}/race.py",
        old="num_right += int(log_probs.argmax() == choice.answer)",
        new="num_right += int(per_byte.argmax() == choice.answer)",
        caught="race: accuracy",
    ),
    TaskMutation(
        name="a word's perplexity is that of a token",
        file=f"{TASKS}/perplexity.py",
        old='"word_perplexity": perplexity_of(loss * count / max(num_words, 1))',
        new='"word_perplexity": perplexity_of(loss)',
        caught="perplexity: word perplexity",
    ),
    TaskMutation(
        name="a request that is too long loses its targets",
        file="evaluate/requests.py",
        old="kept = whole[-(seq_len + 1) :]",
        new="kept = whole[: seq_len + 1]",
        caught="requests: targets of a long one",
    ),
    TaskMutation(
        name="targets are looked for one position later",
        file="evaluate/requests.py",
        old="return slice(stop - request.num_targets, stop)",
        new="return slice(stop - request.num_targets + 1, stop + 1)",
        caught="requests: positions of targets",
    ),
    TaskMutation(
        name="requests that share their tokens all have the targets of the first",
        file="evaluate/requests.py",
        old="        request = self._requests[number]\n        stop =",
        new="        request = self._requests[next(n[0] for n in self._shared if number in n)]\n        stop =",
        caught="requests: targets of shared tokens",
    ),
    TaskMutation(
        name="context parallelism cuts requests that are not padded for it",
        file="evaluate/requests.py",
        old="2 * plan.grid.cp if plan.grid.cp > 1 else 1)",
        new="1)",
        caught="requests: padding for context parallelism",
    ),
    TaskMutation(
        name="every task of a run gets the scores of the first",
        file="evaluate/training_tasks.py",
        old="            first = last\n",
        new="",
        caught="run: metrics of the second task",
    ),
    TaskMutation(
        name="metrics of a checkpoint are those of the step at which they are ready",
        file="evaluate/training_tasks.py",
        old="step=output.step)",
        new="step=0)",
        caught="run: step of the metrics",
    ),
)


class _Bytes:
    """A token is a byte."""

    eod_id = 256

    def ids(self, text: str) -> list[int]:
        return list(text.encode())


def outcome(_folder: Path) -> str:
    """What is wrong with the tasks of the package, the first thing; ``sound`` if nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        for check in (_wikitext, _windows, _lambada, _race, _perplexity, _requests, _run):
            for what in check(Path(folder)):
                return what
    return "sound"


def _scored(questions, vowels=b" aeiou"):
    """A log-probability of -1 a target; greedy where the target is a vowel."""
    import numpy as np

    from raymega.evaluate.requests import Scores

    return [
        Scores(
            log_probs=np.full(request.num_targets, -1.0),
            is_greedy=np.isin(request.tokens[-request.num_targets :], list(vowels)),
        )
        for request in questions.requests
    ]


def _wikitext(folder: Path) -> Iterator[str]:
    from raymega.evaluate.tasks.task import Settings
    from raymega.evaluate.tasks.wikitext import detokenise, wikitext

    raw = " = A title = \n He had 2 @,@ 500 cats , and a <unk> . \n"
    (folder / "wiki").write_text(raw)
    questions = wikitext(folder / "wiki", _Bytes(), Settings(seq_len=16))
    metrics, _ = questions.judge(_scored(questions))
    num_words, num_tokens = len(raw.strip().split(" ")), len(detokenise(raw).encode())
    if not isclose(metrics["word_perplexity"], exp((num_tokens - 1) / (num_words - 1))):
        yield "wikitext: word perplexity"


def _windows(_folder: Path) -> Iterator[str]:
    from raymega.evaluate.tasks.windows import windows

    found = windows(range(50), seq_len=8, stride=3)
    targets = [t for each in found for t in each.tokens[-each.num_targets :].tolist()]
    if targets != list(range(1, 50)):
        yield "windows: tokens scored"
    if any(len(each.tokens) != 9 for each in found[:-1]):
        yield "windows: context"


def _lambada(folder: Path) -> Iterator[str]:
    from raymega.evaluate.tasks.lambada import lambada
    from raymega.evaluate.tasks.task import Settings

    (folder / "l.jsonl").write_text('{"text": "she said aei"}\n{"text": "he had a kite"}\n')
    questions = lambada(folder / "l.jsonl", _Bytes(), Settings(seq_len=16))
    metrics, _ = questions.judge(_scored(questions))
    if metrics["accuracy"] != 0.5 or metrics["accuracy_loose"] != 1.0:
        yield "lambada: accuracy"


def _race(folder: Path) -> Iterator[str]:
    import numpy as np

    from raymega.evaluate.tasks.race import race
    from raymega.evaluate.tasks.task import Settings

    article = {"article": "A.", "questions": ["B?"], "options": [["c", "ccc"]], "answers": ["A"]}
    (folder / "r.json").write_text(json.dumps(article))
    questions = race(folder / "r.json", _Bytes(), Settings(seq_len=64))
    # -2 for two bytes with the blank, -3 for four: the first is likelier, the second a byte
    scores = [
        replace(each, log_probs=np.array([-2.0 - n])) for n, each in enumerate(_scored(questions))
    ]
    if questions.judge(scores)[0] != {"accuracy": 1.0, "accuracy_per_byte": 0.0}:
        yield "race: accuracy"


def _perplexity(folder: Path) -> Iterator[str]:
    from raymega.evaluate.tasks.perplexity import perplexity
    from raymega.evaluate.tasks.task import Settings

    (folder / "p.txt").write_text("one two")
    questions = perplexity(folder / "p.txt", _Bytes(), Settings(seq_len=16))
    if not isclose(questions.judge(_scored(questions))[0]["word_perplexity"], exp(7 / 2)):
        yield "perplexity: word perplexity"


def _requests(_folder: Path) -> Iterator[str]:
    from raymega.config.load import parse_job
    from raymega.evaluate.requests import RequestSource, make_request, request_multiple
    from raymega.plan.run_plan import make_plan

    long = make_request(range(30), 3, seq_len=16)
    if long.tokens[-long.num_targets :].tolist() != [27, 28, 29]:
        yield "requests: targets of a long one"
    asked = [make_request(range(n, n + 6), 2, seq_len=16) for n in (0, 20, 40)]
    source = RequestSource(asked, seq_len=16)
    for index in range(source.num_rows):
        row = source.row(index)
        for number in source.members(index):
            at = source.targets(number)
            if row.labels[at].tolist() != asked[number].tokens[-2:].tolist():
                yield "requests: positions of targets"
    ends = [make_request(range(6), number, seq_len=16) for number in (4, 1)]
    source = RequestSource(ends, seq_len=16)
    if source.num_rows != 1 or source.row(0).documents != (5, 11):
        yield "requests: shared tokens are read twice"
    if [source.targets(number) for number in source.members(0)] != [slice(1, 5), slice(4, 5)]:
        yield "requests: targets of shared tokens"
    verify = Path(__file__).parents[2] / "jobs" / "verify.yaml"
    plan = make_plan(parse_job(verify, ["parallel.cp=2"]).job())
    if request_multiple(plan) % 4:
        yield "requests: padding for context parallelism"


def _run(folder: Path) -> Iterator[str]:
    from raymega.evaluate.requests import pack_scores
    from raymega.evaluate.tasks.lambada import lambada
    from raymega.evaluate.tasks.task import Settings
    from raymega.evaluate.training_tasks import TrainingTasks
    from raymega.messages import EntryOutput

    for name, text in (("a", "he had a kite"), ("b", "she said aei")):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    questions = tuple(
        lambada(folder / f"{name}.jsonl", _Bytes(), Settings(seq_len=16)) for name in "ab"
    )
    tasks = TrainingTasks(titles=("a", "b"), questions=questions)
    scores = [each for part in questions for each in _scored(part)]
    data = pack_scores([s.log_probs for s in scores], [s.is_greedy for s in scores])
    event = tasks.judge_output(EntryOutput(rank=0, step=7, data=data))
    if event.metrics["eval/task/b/accuracy"] != 1.0:
        yield "run: metrics of the second task"
    if event.step != 7:
        yield "run: step of the metrics"
