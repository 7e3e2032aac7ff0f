"""Samples of text that a run shows every ``run.samples_every`` steps, drawn on the training grid.

Training is not changed: a sample reads the weights, and its random numbers have keys of their own.
"""

from __future__ import annotations

from raymega.config.encoder import NO_TOKEN
from raymega.data.text_codec import codec_of_dataset, prompt_ids, sample_images
from raymega.events import SamplesDrawn
from raymega.messages import Channel, Working
from raymega.plan.batch import row_length
from raymega.plan.sampling import Sampling
from raymega.train.build import TrainingComponents
from raymega.train.build_scorer import forward_of
from raymega.train.sampling import TokenGenerator


class RunSampler:
    """Sampler of one rank; :meth:`report_when_due` is called on all ranks.

    Args:
        parts: Components of the rank.
        channel: Connection to the driver.
        rank: Global rank.
    """

    def __init__(self, parts: TrainingComponents, channel: Channel, rank: int) -> None:
        plan, self._run = parts.plan, parts.plan.job.run
        self._channel, self._rank = channel, rank
        if not self._run.samples_every:
            return
        # prompts: the tokenizer is that of the dataset
        codec = codec_of_dataset(next(iter(plan.job.data.datasets)))
        assert codec is not None, "sample_prompt_faults has found it"
        self._codec = codec
        vision, texts = plan.job.model.vision, self._run.sample_prompts
        self._images = sample_images(codec, texts, self._run.sample_images, vision)
        self._prompts = [
            prompt_ids(codec, text, images, vision)
            for text, images in zip(texts, self._images or [[]] * len(texts), strict=True)
        ]
        self._sampling = Sampling(
            max_tokens=self._run.sample_tokens,
            temperature=self._run.sample_temperature,
            seed=self._run.seed,
        )
        # the pipeline, with transfers of its own
        longest = max(map(len, self._prompts)) + self._run.sample_tokens
        self._generator = TokenGenerator(
            plan,
            forward_of(parts, lambda: None),
            parts.groups,
            context=parts.modules[0].context,
            device=parts.device,
            seq_len=row_length(longest, plan.job),
        )

    def report_when_due(self, step: int) -> None:
        """Draw and report samples if they are due after ``step``."""
        if not self._run.samples_every or step % self._run.samples_every:
            return
        answers = self._generator.answers(
            self._prompts,
            self._sampling,
            images=self._images,
            is_done=lambda number, tokens: self._codec.is_done(
                tokens, self._sampling, after=self._prompts[number]
            ),
            on_token=lambda _count: self._channel.report(Working(rank=self._rank)),
        )
        if self._rank == 0:
            texts = tuple(map(self._text, self._prompts, answers))
            drawn = SamplesDrawn(step=step, prompts=self._run.sample_prompts, texts=texts)
            self._channel.report(drawn)

    def _text(self, prompt: list[int], tokens: list[int]) -> str:
        # a sample stops no run
        kept = [token for token in tokens if token != NO_TOKEN]
        text = self._codec.answer(kept, self._sampling, after=prompt)[0]
        return text if len(kept) == len(tokens) else f"{text} (the next logits are NaN or Inf)"
