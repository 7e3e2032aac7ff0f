"""Answers end at stop strings across tokens, at the end of the text, and at their length."""

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace

from raymega.data.text_codec import TextCodec
from raymega.errors import ConfigError
from raymega.plan.sampling import Sampling
from raymega.prepare.tokenizer.trained import byte_tokenizer

END = 256
SPACE = "\u2581"
WORDS = (f"{SPACE}Once", f"{SPACE}upon", f"{SPACE}a", f"{SPACE}time", "n", "<unk>")


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


@pytest.mark.parametrize("prompt", [(), _ids("a")])
def test_answer_ends_at_a_special_token_that_a_stop_string_spells(prompt):
    codec = TextCodec(byte_tokenizer().encode())
    tokens, sampling = [*_ids("one"), END, *_ids("two")], Sampling(stop=("<|endoftext|>",))
    ends = [n for n in range(1, 8) if codec.is_done(tokens[:n], sampling, after=prompt)]
    assert ends[0] == 4 and codec.answer(tokens[:4], sampling, after=prompt) == ("one", "stop")


def test_the_space_between_prompt_and_answer_is_the_answers():
    # as in tokenizers of SentencePiece: a space begins each word, and none begins a text
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Metaspace(), decoders.Metaspace()
    codec = TextCodec(tokenizer.to_str().encode())
    prompt, answer = codec.encode("Once upon"), [2, 4, 3]
    assert codec.answer(answer, Sampling(), after=prompt) == (" an time", "length")
    assert codec.answer(answer, Sampling()) == ("an time", "length")
    sampling = Sampling(stop=(" an",))
    assert codec.is_done(answer, sampling, after=prompt) and not codec.is_done(answer, sampling)
    assert codec.answer(answer, sampling, after=prompt) == ("", "stop")


def test_a_character_that_begins_in_the_prompt_is_left_whole_or_alone(codec):
    first, last = "ä".encode()
    assert codec.answer([last, 97], Sampling(), after=[first]) == (
        codec.decode([last, 97]),
        "length",
    )


def test_prompt_that_spells_a_special_token_is_that_token(codec):
    assert codec.encode("a<|endoftext|>b") == [97, END, 98]
    assert codec.vocab_size == 257


def test_text_that_is_no_tokenizer_is_an_error():
    with pytest.raises(ConfigError, match="json cannot be read"):
        TextCodec(b"{}")
