"""Values that cross between `raymega generate` and the workers of its grid."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from raymega.config.vision.section import CHANNELS
from raymega.data.rows import Pixels
from raymega.data.text_codec import TextCodec
from raymega.plan.sampling import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Prompts to continue, and what decides where an answer ends.

    Attributes:
        prompts: Tokens of each prompt.
        limits: Largest number of new tokens of each answer: the model's length bounds it too.
        sampling: Choice of the tokens.
        tokenizer_json: Content of the tokenizer's file.
        end_ids: Tokens that end an answer.
        images: Pixels of each prompt's images, [3, height, width] uint8 each; empty where no prompt has one.
        is_continued: Whether the text of an answer follows that of its prompt, a space between them included.
    """

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    sampling: Sampling
    tokenizer_json: str
    end_ids: Sequence[int]
    images: Sequence[Sequence[Pixels]] = ()
    is_continued: bool = True

    def codec(self) -> TextCodec:
        """Return the tokenizer."""
        return TextCodec(self.tokenizer_json.encode(), self.end_ids)

    def is_done(self, codec: TextCodec, number: int, tokens: Sequence[int]) -> bool:
        """Return True if the answer to prompt ``number`` ends with its newest token."""
        return len(tokens) >= self.limits[number] or codec.is_done(
            tokens, self.sampling, after=self._before(number)
        )

    def answer(self, codec: TextCodec, number: int, tokens: Sequence[int]) -> tuple[str, str]:
        """Return the text of the answer to prompt ``number``, and why it ended."""
        return codec.answer(tokens, self.sampling, after=self._before(number))

    def _before(self, number: int) -> Sequence[int]:
        return self.prompts[number] if self.is_continued else ()

    def pack(self) -> bytes:
        """Return the task as bytes, for :func:`unpack_task`."""
        coded = [[_coded(image) for image in own] for own in self.images]
        return json.dumps(asdict(replace(self, images=())) | {"images": coded}).encode()


def unpack_task(data: bytes) -> Task:
    """Return the task of :meth:`Task.pack`."""
    found = json.loads(data)
    sampling = found.pop("sampling")
    images = [[*map(_decoded, own)] for own in found.pop("images")]
    return Task(
        sampling=Sampling(**(sampling | {"stop": tuple(sampling["stop"])})), images=images, **found
    )


def _coded(image: Pixels) -> tuple[int, str]:
    """Return the height of an image, and its pixels as text."""
    return image.shape[1], base64.b64encode(image.tobytes()).decode()


def _decoded(coded: tuple[int, str]) -> Pixels:
    height, text = coded
    return np.frombuffer(base64.b64decode(text), dtype=np.uint8).reshape(CHANNELS, height, -1)
