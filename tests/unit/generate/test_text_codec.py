"""Answers end at stop strings across tokens, at the end of the text, and at their length."""

import pytest

from raymega.data.text_codec import TextCodec
from raymega.errors import ConfigError
from raymega.plan.sampling import Sampling
from raymega.prepare.tokenizer.trained import byte_tokenizer

END = 256


@pytest.fixture(scope="module")
def codec():
    return TextCodec(byte_tokenizer().encode(), [END])


def _ids(text):
    return list(text.encode())


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "reason", "num_kept"),
    [
        (_ids("one. Two"), ("xyz",), "one. Two", "length", 8),
        (_ids("one. Two"), (". T",), "one", "stop", 6),  # three tokens of a byte each
        (_ids("one. Two"), ("Two", "e."), "on", "stop", 4),
        (_ids("aä. b"), ("ä",), "a", "stop", 3),  # one character in two tokens
        ([*_ids("one"), END], (), "one", "end", 4),
        ([*_ids("one."), END], (".",), "one", "stop", 4),
    ],
)
def test_answer_ends_where_it_must(codec, tokens, stop, text, reason, num_kept):
    sampling = Sampling(max_tokens=len(tokens), stop=stop)
    ends = [n for n in range(1, len(tokens) + 1) if codec.is_done(tokens[:n], sampling)]
    assert ends[0] == num_kept
    assert codec.answer(tokens[:num_kept], sampling) == (text, reason)


def test_prompt_that_spells_a_special_token_is_that_token(codec):
    assert codec.encode("a<|endoftext|>b") == [97, END, 98]
    assert codec.vocab_size == 257


def test_text_that_is_no_tokenizer_is_an_error():
    with pytest.raises(ConfigError, match="json cannot be read"):
        TextCodec(b"{}")
