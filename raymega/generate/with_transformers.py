"""Continues prompts by transformers' `generate` with its cache, on one device, from an exported folder.

The tokens are chosen by raymega's own sampler: a logits processor leaves the chosen token alone, which transformers
then takes as the likeliest. So the text of a seed is that of every grid. `raymega/generate/run.py` names this module
by a string, because it loads torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
)
from transformers.utils import logging as their_logging

from raymega.config.encoder import NO_TOKEN
from raymega.config.vision.section import VisionSection
from raymega.data.text_codec import TextCodec
from raymega.errors import NumericsError
from raymega.generate.answers import Task
from raymega.generate.image_inputs import image_inputs
from raymega.parallel.tensor_parallel.token_choice import choose_tokens
from raymega.plan.sampling import Sampling, no_choice

Tokens = list[int]


class Engine:
    """Model of transformers on one device.

    Args:
        folder: Folder of the exported model.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.
    """

    def __init__(self, folder: Path, *, device: str) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        their_logging.disable_progress_bar()
        config = AutoConfig.from_pretrained(folder)
        kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        if hasattr(config, "vision_config"):
            kind = AutoModelForImageTextToText
        model: Any = kind.from_pretrained(folder, dtype="auto")
        self.model = model.to(device).eval()
        if model.dtype == torch.float64:
            model.config._experts_implementation = "eager"  # their grouped product has no float64

    def generate(
        self,
        task: Task,
        *,
        batch_size: int,
        vision: VisionSection = VisionSection(),  # noqa: B008  # it is frozen
        on_answers: Callable[[int], None] = lambda _count: None,
    ) -> list[Tokens]:
        """Return the new tokens after each prompt.

        Args:
            task: Prompts of at least one token, choice of the tokens, and what ends an answer.
            batch_size: Number of prompts at once.
            vision: Section of the model's tower, for prompts with images.
            on_answers: Function that is told how many answers are whole.
        """
        codec = task.codec()
        found: dict[int, Tokens] = {}
        for numbers in _batches(task.limits, batch_size):
            images = (
                [image for number in numbers for image in task.images[number]]
                if task.images
                else []
            )
            beside: Callable[[Tensor], dict[str, Tensor]] = _nothing
            if images:
                beside = partial(image_inputs, images, vision=vision)
            found |= _generate_batch(self.model, task, numbers, codec, beside)
            on_answers(len(found))
        return [found[number] for number in range(len(task.prompts))]


def _batches(limits: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Yield the numbers of the prompts of each batch; all have the same limit.

    A row cannot leave a batch, and behind its limit its positions would be beyond the model's.
    """
    order = sorted(range(len(limits)), key=lambda number: limits[number])
    for _, same in groupby(order, key=lambda number: limits[number]):
        numbers = list(same)
        yield from (numbers[at : at + batch_size] for at in range(0, len(numbers), batch_size))


def _generate_batch(
    model: Any,
    task: Task,
    numbers: Sequence[int],
    codec: TextCodec,
    beside: Callable[[Tensor], dict[str, Tensor]],
) -> dict[int, Tokens]:
    """Return the answers to the prompts ``numbers``, which have the same limit, by number.

    ``beside`` returns what the model takes beside tokens [rows, S]: the inputs of images.
    """
    prompts, limit = [task.prompts[number] for number in numbers], task.limits[numbers[0]]
    # an encoder reads the end of a text as in training; the answer is the decoder's, behind its first token
    config, is_two_sided = model.config, model.config.is_encoder_decoder
    if is_two_sided:
        end = config.eos_token_id  # which T5's tokenizer writes by itself
        prompts = [[*prompt, *([end] if prompt[-1] != end else [])] for prompt in prompts]
    # ragged prompts: padding on the left, which neither attention nor positions count
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    # neither the end of a text nor the sampling is left to the settings in the folder
    settings = GenerationConfig(max_new_tokens=limit, do_sample=False, pad_token_id=0)
    if is_two_sided:
        settings.decoder_start_token_id = config.decoder_start_token_id
        # transformers 5 makes a cache of as many layers as the encoder has
        layers = config.num_hidden_layers
        settings.use_cache = getattr(config, "num_decoder_layers", layers) <= layers
    model.generation_config = settings
    start = 1 if is_two_sided else longest
    ends = _Ends(numbers, start, partial(task.is_done, codec))
    with torch.inference_mode():
        output = model.generate(
            input_ids=tokens.to(model.device),
            attention_mask=mask.to(model.device),
            **{name: values.to(model.device) for name, values in beside(tokens).items()},
            generation_config=settings,
            logits_processor=[_Choice(numbers, start, task.sampling)],
            stopping_criteria=[ends],
        )
    answers = output[:, start:].tolist()
    return {
        number: answer[: ends.lengths.get(number, limit)]
        for number, answer in zip(numbers, answers, strict=True)
    }


def _nothing(_tokens: Tensor) -> dict[str, Tensor]:
    return {}


class _Choice(LogitsProcessor):
    """Choose each row's next token, and leave it alone with a logit."""

    def __init__(self, numbers: Sequence[int], start: int, sampling: Sampling) -> None:
        self._numbers, self._start, self._sampling = torch.tensor(numbers), start, sampling

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [rows, V] of minus infinity, and 0 at the chosen token."""
        logits, ids = scores.cpu().sort(dim=-1, descending=True, stable=True)
        places = torch.full_like(self._numbers, input_ids.shape[1] - self._start)
        chosen = choose_tokens(logits, ids, self._sampling, prompts=self._numbers, places=places)
        for row in (chosen == NO_TOKEN).nonzero().flatten().tolist():
            raise NumericsError(no_choice(int(self._numbers[row]), int(places[row])))
        alone = torch.full_like(scores, -torch.inf)
        return alone.scatter_(-1, chosen[:, None].to(scores.device), 0.0)


class _Ends(StoppingCriteria):
    """End each row where its answer ends, and keep the length; the batch ends with the last row."""

    def __init__(
        self, numbers: Sequence[int], start: int, is_done: Callable[[int, Tokens], bool]
    ) -> None:
        self._numbers, self._start, self._is_done = numbers, start, is_done
        self.lengths: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor, **_kwargs: object) -> Tensor:  # noqa: ARG002
        """Return True for each row that has ended, [rows]."""
        for number, tokens in zip(self._numbers, input_ids[:, self._start :].tolist(), strict=True):
            if number not in self.lengths and self._is_done(number, tokens):
                self.lengths[number] = len(tokens)
        done = [number in self.lengths for number in self._numbers]
        return cast(Tensor, torch.tensor(done, device=input_ids.device))
