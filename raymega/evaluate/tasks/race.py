"""Task ``race``: reading questions with options, answered by the likeliest one (arXiv:1704.04683).

A file holds JSON objects with ``article``, and lists ``questions``, ``options`` and ``answers`` (letters from A).
An option's score is the sum of its tokens' log-probabilities after the article and the question. A question with
a blank ``_`` is a sentence to fill in: the option takes the blank's place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raymega.errors import ConfigError, Fault
from raymega.evaluate.requests import Scores, make_request
from raymega.evaluate.tasks.json_lines import read_objects
from raymega.evaluate.tasks.task import Questions, Settings, TextTokenizer

BLANK = "_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A question: text before each option's continuation, the continuations, and the index of the right one."""

    context: str
    options: tuple[str, ...]
    answer: int


def read_choices(path: Path) -> Iterator[Choice]:
    """Yield the questions of a file.

    Raises:
        ConfigError: An object has no such question.
    """
    for place, found in read_objects(path):
        try:
            article = str(found["article"])
            rows = zip(found["questions"], found["options"], found["answers"], strict=True)
            choices = [_choice(article, q, options, answer) for q, options, answer in rows]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            fault = Fault(
                fact=f"{place} is not in RACE's form: {type(error).__name__}: {error}",
                rule="it is an object with article, and as many questions as options and answers (A, B, ...)",
                remedy="correct the line",
            )
            raise ConfigError(fault) from error
        yield from choices


def _choice(article: str, question: str, options: Sequence[str], answer: str) -> Choice:
    number = ord(answer) - ord("A")
    if not 0 <= number < len(options):
        raise ValueError(f"answer {answer!r} of {len(options)} options")
    if BLANK in question:
        before, _, after = question.partition(BLANK)
        context = f"{article}\n{before.rstrip()}".rstrip()
        return Choice(
            context=context, options=tuple(f" {o}{after}" for o in options), answer=number
        )
    context = f"{article}\nQuestion: {question}\nAnswer:"
    return Choice(context=context, options=tuple(f" {o}" for o in options), answer=number)


def race(path: Path, tokenizer: TextTokenizer, settings: Settings) -> Questions:
    """Return a request for each option of each question; see the module."""
    choices = list(read_choices(path))[: settings.limit or None]
    requests = []
    for choice in choices:
        context = tokenizer.ids(choice.context)
        for option in choice.options:
            target = tokenizer.ids(option)
            requests.append(
                make_request([*context, *target], len(target), seq_len=settings.seq_len)
            )

    def judge(scores: Sequence[Scores]) -> tuple[Mapping[str, float], list[dict[str, object]]]:
        sums = iter(float(each.log_probs.sum()) for each in scores)
        samples: list[dict[str, object]] = []
        num_right = num_right_by_length = 0
        for choice in choices:
            log_probs = np.array([next(sums) for _ in choice.options])
            per_byte = log_probs / [len(option.encode()) for option in choice.options]
            num_right += int(log_probs.argmax() == choice.answer)
            num_right_by_length += int(per_byte.argmax() == choice.answer)
            samples.append(
                {
                    "answer": choice.answer,
                    "chosen": int(log_probs.argmax()),
                    "log_probs": log_probs.tolist(),
                }
            )
        return {
            "accuracy": num_right / len(choices),
            "accuracy_per_byte": num_right_by_length / len(choices),
        }, samples

    return Questions(requests=requests, judge=judge, documents=len(choices))
