"""TextCodec: text to the tokens of a prompt, and tokens to text, by a tokenizer.json.

Unlike a dataset's documents, a prompt gets the tokens with which the model's texts begin, and special tokens that
it spells out are these tokens, as transformers reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from raymega.config.data import DataSection
from raymega.config.vision.section import VisionSection
from raymega.data.format import TOKENIZER_FILE
from raymega.data.images.files import MARK, BrokenImageError, prompt_images, with_patches
from raymega.data.rows import Pixels
from raymega.data.tokenizer_files import special_ids, tokenizer_of_dataset
from raymega.errors import ConfigError, Fault
from raymega.plan.sampling import Sampling, before_stop


class TextCodec:
    """Tokenizer of prompts and answers.

    Args:
        tokenizer_json: Content of a tokenizer.json.
        end_ids: Tokens that end an answer.

    Raises:
        ConfigError: The content is no tokenizer of the `tokenizers` library.
    """

    def __init__(self, tokenizer_json: bytes, end_ids: Collection[int] = ()) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json.decode())
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(
                fact=f"the model's {TOKENIZER_FILE} cannot be read: {error}",
                rule="it is a file of the `tokenizers` library",
                remedy="put the one that came with the model in its place",
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.end_ids = frozenset(end_ids)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the largest one plus 1."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, prompt: str, *, is_rendered: bool = False) -> list[int]:
        """Return the tokens of a prompt; one that is rendered by a chat template has its first token."""
        return list(self._tokenizer.encode(prompt, add_special_tokens=not is_rendered).ids)

    def encode_marked(self, prompt: str, token_id: int, *, is_rendered: bool = False) -> list[int]:
        """Return the tokens of a prompt in which each MARK is the token ``token_id``, as its own text is."""
        token = self._tokenizer.id_to_token(token_id)
        text = prompt if token is None else prompt.replace(MARK, token)
        return self.encode(text, is_rendered=is_rendered)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self._tokenizer.decode([*tokens], skip_special_tokens=True))

    def is_done(
        self, tokens: Sequence[int], sampling: Sampling, *, after: Sequence[int] = ()
    ) -> bool:
        """Return True if an answer ends with its newest token: by an end, a stop string or its length."""
        if tokens[-1] in self.end_ids or len(tokens) >= sampling.max_tokens:
            return True
        return bool(sampling.stop) and (
            self._is_stop(tokens[-1], sampling)
            or before_stop(self._text(tokens, after), sampling.stop) is not None
        )

    def answer(
        self, tokens: Sequence[int], sampling: Sampling, *, after: Sequence[int] = ()
    ) -> tuple[str, str]:
        """Return the text of an answer before its end, and why it ended: ``stop``, ``end`` or ``length``.

        Args:
            tokens: Tokens of the answer.
            sampling: Stop strings.
            after: Tokens of the prompt that the answer's text continues; empty for a text of its own.
        """
        is_ended = bool(tokens) and tokens[-1] in self.end_ids
        text = self._text(tokens[:-1] if is_ended else tokens, after)
        before = before_stop(text, sampling.stop)
        if before is not None:
            return before, "stop"
        is_stopped = bool(tokens) and self._is_stop(tokens[-1], sampling)
        return text, "stop" if is_stopped else "end" if is_ended else "length"

    def _text(self, tokens: Sequence[int], after: Sequence[int]) -> str:
        """Return the text of ``tokens`` behind ``after``; decoders of SentencePiece drop the space that begins a text."""
        head, whole = self.decode(after[-1:]), self.decode([*after[-1:], *tokens])
        # a character that begins in the prompt's last token has another text there
        return whole[len(head) :] if whole.startswith(head) else self.decode(tokens)

    def _is_stop(self, token: int, sampling: Sampling) -> bool:
        """Return whether a token is a special one that a stop string spells, which no text shows."""
        return self._tokenizer.id_to_token(token) in sampling.stop and not self.decode([token])


def codec_of_dataset(path: str) -> TextCodec | None:
    """Return the codec of the dataset at ``path``; None for one without a legible tokenizer.json."""
    files = tokenizer_of_dataset(path)
    if TOKENIZER_FILE not in files:
        return None
    try:
        codec = TextCodec(files[TOKENIZER_FILE])
    except ConfigError:
        return None
    end = special_ids(files).eos
    codec.end_ids = frozenset(() if end is None else (end,))
    return codec


def prompt_ids(
    codec: TextCodec, prompt: str, images: Sequence[Pixels], vision: VisionSection
) -> list[int]:
    """Return the tokens of a prompt of a run, with those of each image's patches in the place of its mark."""
    if not vision.is_on:
        return codec.encode(prompt)
    token = vision.image_token_id
    return with_patches(codec.encode_marked(prompt, token), token, images, vision.sizes)


def sample_images(
    codec: TextCodec, prompts: Sequence[str], paths: Sequence[str], vision: VisionSection
) -> list[list[Pixels]]:
    """Return the pixels of each sample's images; none at all where no file is given.

    Raises:
        ConfigError: A file is missing or broken, or a mark is no token of an image.
    """
    # a text of a model without images may spell the mark
    if not (vision.is_on or paths):
        return []
    try:
        if not vision.is_on:
            raise BrokenImageError("model.vision.kind=none")
        _check_marks(codec, prompts, vision.image_token_id)
        return prompt_images(prompts, paths, vision.sizes, purpose="run.sample_images")
    except BrokenImageError as error:
        raise ConfigError(
            fact=f"run.sample_images: {error}",
            rule="each mark <image> in run.sample_prompts stands for a file of an image, which a vision tower reads",
            remedy="set run.sample_images=[cat.png], with a file for each mark",
        ) from error


def _check_marks(codec: TextCodec, prompts: Sequence[str], token_id: int) -> None:
    """Raise if a prompt has other tokens of images than marks: one that it spells itself has no file."""
    for text in prompts:
        marks, tokens = text.count(MARK), codec.encode_marked(text, token_id).count(token_id)
        if marks != tokens:
            raise BrokenImageError(
                f"{text[:40]!r} has {marks} marks {MARK} and {tokens} tokens model.vision.image_token_id={token_id}"
            )


def sample_prompt_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the faults of ``run.sample_prompts`` that the run's tokenizer shows.

    Args:
        values: Fields of the job that are valid, by dotted path.
    """
    prompts, tokens = values.get("run.sample_prompts", ()), values.get("run.sample_tokens", 0)
    seq_len = values.get("data.seq_len", 0)
    wanted = [f"data.{name}" for name in ("path", "sources", "stages")]
    is_known = all(name in values for name in wanted) and seq_len and tokens
    if not (values.get("run.samples_every") and prompts and is_known):
        return
    found = {name.removeprefix("data."): values[name] for name in wanted}
    path, field = next(iter(DataSection.model_construct(**found).datasets.items()))
    codec = codec_of_dataset(path)
    if codec is None:
        yield Fault(
            fact=f"{field}={path!r} has no legible {TOKENIZER_FILE}",
            rule="run.samples_every cuts run.sample_prompts into the model's tokens by it",
            remedy="set run.samples_every=0, or train on a dataset of `raymega data prepare`",
        )
        return
    vision, paths = values.get("model.vision", VisionSection()), values.get("run.sample_images", ())
    images: Sequence[Sequence[Pixels]] = [()] * len(prompts)
    try:
        images = sample_images(codec, prompts, paths, vision) or images
    except ConfigError as error:
        yield from error.faults
    for prompt, own in zip(prompts, images, strict=True):
        length = len(prompt_ids(codec, prompt, own, vision))
        if not 0 < length <= seq_len - tokens:
            yield Fault(
                fact=f"run.sample_prompts has {prompt[:40]!r} of {length} tokens",
                rule=f"a prompt has at least 1 token, and at most {seq_len - tokens}: data.seq_len={seq_len} less run.sample_tokens={tokens}",
                remedy="shorten it, or set fewer run.sample_tokens",
            )
