"""Sampling: how the tokens of a generated text are chosen, and where the text ends.

`raymega.parallel.tensor_parallel.token_choice` makes the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from raymega.errors import Fault

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Rules of a generated text.

    Attributes:
        max_tokens: Largest number of new tokens.
        temperature: Divisor of the logits; 0 takes the likeliest token (greedy).
        top_k: Number of likeliest tokens to choose from; 0 is all.
        top_p: Share of probability to choose from: the fewest likeliest tokens that reach it.
        stop: Texts before which an answer ends.
        seed: Seed of the random numbers. Each token's are a function of the seed, the number of the
            prompt, the place of the token in the answer, and the token's id.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def num_candidates(self, vocab_size: int) -> int:
        """Return the number of likeliest tokens that the choice reads."""
        if self.temperature == 0:
            return 1
        return min(self.top_k, vocab_size) or vocab_size


def _stops_of(value: Any) -> tuple[str, ...]:
    """Return the stop texts of a request; a text is one of them, not a list of letters."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError("it is a text, or a list of texts")
    return tuple(value)


FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "max_tokens": index,
    "temperature": float,
    "top_k": index,
    "top_p": float,
    "stop": _stops_of,
    "seed": index,
}
"""Fields of Sampling in a server's request, with what makes them of JSON's values."""


def sampling_of(request: Mapping[str, Any]) -> Sampling:
    """Return the rules that a server's request names, and defaults for the rest and for null.

    Raises:
        ValueError: A field has a value of another kind.
    """
    found = {}
    for name in (each for each in FIELDS if request.get(each) is not None):
        try:
            found[name] = FIELDS[name](request[name])
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{name}={request[name]!r}: {error}") from error
    return Sampling(**found)


def sampling_faults(sampling: Sampling) -> Iterator[Fault]:
    """Yield a fault for each value that makes no text."""
    if sampling.max_tokens < 1:
        yield Fault(
            fact=f"--max-tokens {sampling.max_tokens}",
            rule="an answer has at least 1 token",
            remedy="give --max-tokens 64",
        )
    if not 0 <= sampling.temperature < float("inf"):
        yield Fault(
            fact=f"--temperature {sampling.temperature:g}",
            rule="it is 0 (the likeliest token) or a finite number above",
            remedy="give --temperature 0.8",
        )
    if sampling.top_k < 0:
        yield Fault(
            fact=f"--top-k {sampling.top_k}",
            rule="it is the number of likeliest tokens to choose from, or 0 for all",
            remedy="give --top-k 50",
        )
    if not 0 < sampling.top_p <= 1:
        yield Fault(
            fact=f"--top-p {sampling.top_p:g}",
            rule="it is a share of probability above 0, at most 1",
            remedy="give --top-p 0.95",
        )
    if not 0 <= sampling.seed <= MAX_SEED:
        yield Fault(
            fact=f"--seed {sampling.seed}",
            rule=f"it is from 0 to {MAX_SEED}",
            remedy="give --seed 0",
        )
    if "" in sampling.stop:
        yield Fault(
            fact="--stop ''",
            rule="a stop string has at least one character",
            remedy=r"give --stop '\n\n', for example, or none",
        )


def no_choice(prompt: int, place: int) -> Fault:
    """Return the fault of a token that no finite logit chooses, of a prompt and a place that count from 0."""
    return Fault(
        fact=f"the logits of prompt {prompt + 1} for token {place + 1} of its answer are NaN or Inf",
        rule="a token is chosen by finite logits",
        remedy="give --set precision.dtype=float32, or take an earlier checkpoint",
    )


def before_stop(text: str, stops: Sequence[str]) -> str | None:
    """Return ``text`` up to the first stop string in it; None where it has none."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else None
