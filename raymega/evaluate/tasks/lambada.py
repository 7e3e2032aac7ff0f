"""Task ``lambada``: the last word of each passage, predicted from the rest (arXiv:1606.06031).

``accuracy`` counts a passage if every token of the word is the model's likeliest one (Megatron-LM's
``--strict-lambada``). ``accuracy_loose`` counts it if the last token of the passage is: on most passages that is
the word's end only, so it is higher, and no measure of the task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from raymega.evaluate.requests import Scores, make_request
from raymega.evaluate.tasks.json_lines import read_texts
from raymega.evaluate.tasks.task import Questions, Settings, TextTokenizer
from raymega.evaluate.tasks.windows import perplexity_of


def split_last_word(text: str) -> tuple[str, str]:
    """Return the passage before its last word, stripped, and the word after a blank."""
    word = text.split()[-1]
    return text[: text.rfind(word)].strip(), f" {word}"


def lambada(path: Path, tokenizer: TextTokenizer, settings: Settings) -> Questions:
    """Return the requests of a file of JSON lines with ``text``; see the module.

    A text of one word is left out: there is nothing to predict it from.
    """
    passages = [text for text in read_texts(path) if len(text.split()) > 1]
    passages = passages[: settings.limit or None]
    requests = []
    for text in passages:
        # two requests a passage: all tokens of the word; the last token of the passage
        before, word = split_last_word(text)
        target = tokenizer.ids(word)
        strict = [*tokenizer.ids(before), *target]
        loose = tokenizer.ids(text.strip())
        requests.append(make_request(strict, len(target), seq_len=settings.seq_len))
        requests.append(make_request(loose, 1, seq_len=settings.seq_len))

    def judge(scores: Sequence[Scores]) -> tuple[Mapping[str, float], list[dict[str, object]]]:
        strict, loose = scores[::2], scores[1::2]
        losses = [-float(each.log_probs.sum()) for each in strict]
        samples: list[dict[str, object]] = [
            {
                "target": split_last_word(text)[1].strip(),
                "is_right": bool(word.is_greedy.all()),
                "is_right_loose": bool(last.is_greedy.all()),
                "log_prob": -loss,
            }
            for text, word, last, loss in zip(passages, strict, loose, losses, strict=True)
        ]
        metrics = {
            "accuracy": sum(bool(each.is_greedy.all()) for each in strict) / len(strict),
            "accuracy_loose": sum(bool(each.is_greedy.all()) for each in loose) / len(loose),
            "target_perplexity": perplexity_of(sum(losses) / len(losses)),
        }
        return metrics, samples

    return Questions(requests=requests, judge=judge, documents=len(passages))
