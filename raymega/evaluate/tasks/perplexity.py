"""Task ``perplexity``: perplexity of documents, each by itself; a text file is one document.

A document is read in windows of the model's length. Its first token is predicted after the end-of-document token,
as training predicts it; without such a token it is not scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path

from raymega.errors import ConfigError, Fault
from raymega.evaluate.requests import Request, Scores
from raymega.evaluate.tasks.json_lines import read_text, read_texts
from raymega.evaluate.tasks.task import Questions, Settings, TextTokenizer
from raymega.evaluate.tasks.windows import mean_loss, perplexity_of, windows

JSON_SUFFIXES = (".jsonl", ".json")


def perplexity(path: Path, tokenizer: TextTokenizer, settings: Settings) -> Questions:
    """Return the windows over each document; see the module."""
    is_json = path.suffix in JSON_SUFFIXES
    texts = read_texts(path) if is_json else [read_text(path)]
    begin = [] if tokenizer.eod_id is None else [tokenizer.eod_id]
    requests: list[Request] = []
    kept: list[str] = []
    owners: list[int] = []
    for text in texts:
        tokens = [*begin, *tokenizer.ids(text)]
        if len(tokens) > 1 and not 0 < settings.limit <= len(kept):
            found = windows(
                tokens, seq_len=settings.seq_len, stride=settings.stride or settings.seq_len
            )
            requests += found
            owners += [len(kept)] * len(found)
            kept.append(text)
    if not requests:
        fault = Fault(
            fact=f"--data {path} has no document of two tokens",
            rule="a perplexity needs a token after another one",
            remedy="give a file with text",
        )
        raise ConfigError(fault)
    num_words = sum(len(text.split()) for text in kept)
    num_bytes = sum(len(text.encode()) for text in kept)

    def judge(scores: Sequence[Scores]) -> tuple[Mapping[str, float], list[dict[str, object]]]:
        loss, count = mean_loss(scores)
        by_document = [0.0] * len(kept)
        for owner, each in zip(owners, scores, strict=True):
            by_document[owner] -= float(each.log_probs.sum())
        metrics = {
            "loss": loss,
            "token_perplexity": perplexity_of(loss),
            "word_perplexity": perplexity_of(loss * count / max(num_words, 1)),
            "bits_per_byte": loss * count / log(2) / max(num_bytes, 1),
        }
        return metrics, [{"document": n, "loss_sum": total} for n, total in enumerate(by_document)]

    return Questions(requests=requests, judge=judge, documents=len(kept), words=num_words)
