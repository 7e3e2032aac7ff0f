"""Task ``wikitext``: perplexity of one long text by Megatron-LM's protocol.

With T tokens of the detokenised text, T_o words of the raw text and the mean loss of a token, the word perplexity is
exp(loss * (T - 1) / (T_o - 1)). It was called adjusted perplexity: it does not depend on the tokenizer.
Words are counted in the raw file, before detokenising, as ``len(text.strip().split(" "))``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from raymega.errors import ConfigError, Fault
from raymega.evaluate.requests import Scores
from raymega.evaluate.tasks.json_lines import read_text
from raymega.evaluate.tasks.task import Questions, Settings, TextTokenizer
from raymega.evaluate.tasks.windows import mean_loss, perplexity_of, windows

STRIDE = 32
UNKNOWN = "<unk>"
RULES: tuple[tuple[str, str], ...] = (
    # contractions, number separators
    (r"s '", "s'"), (r"/' [0-9]/", "/'[0-9]/"), (r" @-@ ", "-"), (r" @,@ ", ","), (r" @\.@ ", "."),
    # punctuation
    (r" : ", ": "), (r" ; ", "; "), (r" \. ", ". "), (r" ! ", "! "), (r" \? ", "? "), (r" , ", ", "),
    # pairs
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"), (r"\[\s*([^\]]*?)\s*\]", r"[\1]"), (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'), (r"'\s*([^']*?)\s*'", r"'\1'"),
    # headings, units, line ends, numbers
    (r"= = = =", "===="), (r"= = =", "==="), (r"= =", "=="), (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (r" \n", "\n"), (r"\n ", "\n"), (r" N ", " 1 "), (r" 's", "'s"),
)  # fmt: skip
"""Patterns and what takes their place, one after the other: they undo WikiText's tokenisation into words."""


def detokenise(text: str) -> str:
    """Return the text as it was before WikiText cut it into words."""
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text)
    return text


def wikitext(path: Path, tokenizer: TextTokenizer, settings: Settings) -> Questions:
    """Return the windows over a WikiText file; see the module."""
    raw = read_text(path)
    num_words = len(raw.strip().split(" "))
    tokens = tokenizer.ids(detokenise(raw))
    if len(tokens) < 2 or num_words < 2:
        fault = Fault(
            fact=f"--data {path} has {num_words} words and {len(tokens)} tokens",
            rule="a perplexity needs at least two of each",
            remedy="give the raw text of WikiText, such as wiki.test.tokens",
        )
        raise ConfigError(fault)
    stride = settings.stride or STRIDE
    requests = windows(tokens, seq_len=settings.seq_len, stride=stride)
    requests = requests[: settings.limit or None]

    def judge(scores: Sequence[Scores]) -> tuple[Mapping[str, float], list[dict[str, object]]]:
        loss, _ = mean_loss(scores)
        metrics = {
            "word_perplexity": perplexity_of(loss * (len(tokens) - 1) / (num_words - 1)),
            "token_perplexity": perplexity_of(loss),
            "loss": loss,
        }
        samples: list[dict[str, object]] = [
            {
                "window": number,
                "targets": len(each.log_probs),
                "loss": -float(each.log_probs.mean()),
            }
            for number, each in enumerate(scores)
        ]
        return metrics, samples

    return Questions(
        requests=requests,
        judge=judge,
        documents=1,
        words=num_words,
        notes=(
            f"{path.name}: {len(tokens):,} tokens, {raw.count(UNKNOWN):,} {UNKNOWN}; windows of {settings.seq_len:,} "
            f"tokens, stride {stride}; files, windows and strides that differ have other perplexities",
        ),
    )
