"""Generates tokens on the training grid: each new token is the answer of a whole forward pass, without a cache.

So any grid generates, with the weights where they are. It suits short texts; `raymega.generate` has the engine for
long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from raymega.config.encoder import NO_TOKEN
from raymega.config.vision.section import VisionSection
from raymega.data.images.files import held_image, patch_places
from raymega.data.loader import Loader
from raymega.data.rows import TEXT, Pixels, Row
from raymega.model.pipeline_stage import StageModule
from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.comm.process_groups import Groups
from raymega.parallel.context_parallel.context import Context
from raymega.parallel.tensor_parallel.token_choice import choose_tokens
from raymega.plan.batch import make_batch
from raymega.plan.run_plan import RunPlan
from raymega.plan.sampling import Sampling
from raymega.train.build import image_share
from raymega.train.forward_only import ForwardOnly

Tokens = list[int]


class Prompted(NamedTuple):
    """Prompt of a text: its number of tokens, and its images."""

    length: int
    images: Sequence[Pixels]


class _TextRows:
    """Rows of S tokens: a text each, then padding, to which causal attention does not look.

    A text's number grows with every pass, so that the loader never takes an earlier pass for this one.
    """

    def __init__(self, seq_len: int, vision: VisionSection) -> None:
        self.seq_len, self.first, self._vision = seq_len, 0, vision
        self._texts: Sequence[Tokens] = ()
        self._images: Sequence[Prompted] = ()

    def show(self, texts: Sequence[Tokens], images: Sequence[Prompted]) -> None:
        self.first += len(self._texts)
        self._texts, self._images = texts, images

    def row(self, number: int, /) -> Row:
        text = self._texts[number - self.first]
        tokens, labels = np.zeros((2, self.seq_len), dtype=np.int64)
        tokens[: len(text)] = text
        # asks for the token after the last one
        labels[len(text) - 1] = 1
        mask = np.arange(self.seq_len) < len(text)
        row = Row(tokens=tokens, labels=labels, mask=mask, documents=(self.seq_len,))
        return self._with_images(row, self._images[number - self.first]) if self._images else row

    def _with_images(self, row: Row, prompt: Prompted) -> Row:
        places, length = np.full(self.seq_len, TEXT, dtype=np.int64), prompt.length
        # a patch's token that the model itself has written stands for no image
        token, sizes = self._vision.image_token_id, self._vision.sizes
        places[:length] = patch_places(row.tokens[:length], token, prompt.images, sizes)
        images = tuple(held_image(image, sizes) for image in prompt.images)
        return replace(row, images=images, image_places=places)


class TokenGenerator:
    """Generator of one rank; all ranks of the grid call it together, and all get the answers.

    Args:
        plan: Plan of the grid.
        forward: Forward-only pipeline of this rank, with the weights.
        groups: Process groups of this rank.
        context: Ranks that share a row's tokens.
        device: Device of this rank.
        seq_len: Length S of a row, legal on the grid: a text has at most S + 1 tokens.
    """

    def __init__(  # the two assemblers call it
        self,
        plan: RunPlan,
        forward: ForwardOnly,
        groups: Groups,
        *,
        context: Context,
        device: torch.device,
        seq_len: int,
    ) -> None:
        self._plan, self._forward, self._groups, self._device = plan, forward, groups, device
        vision, rank = plan.job.model.vision, groups.world.ranks[groups.world.index]
        self._rows = _TextRows(seq_len, vision)
        # texts alone leave the tower out
        make = partial(
            Loader, self._rows, dp_rank=plan.grid.coords(rank).dp, device=device, context=context
        )
        self._loader = make()
        self._image_loader = make(images=image_share(plan, rank), vision=vision)
        self._vocab_size = plan.job.model.vocab_size
        self._prompted: list[Prompted] = []

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        is_done: Callable[[int, Tokens], bool],
        images: Sequence[Sequence[Pixels]] = (),
        on_token: Callable[[int], None] = lambda _number: None,
    ) -> list[Tokens]:
        """Return the new tokens after each prompt; NO_TOKEN ends an answer whose next logits are no finite numbers.

        Args:
            prompts: Prompts of at least one token, the same on all ranks.
            sampling: Choice of the tokens.
            images: Pixels of each prompt's images, the same on all ranks; empty where no prompt has one.
            is_done: Function that tells, from a prompt's number and its answer, whether the answer ends here.
            on_token: Function that is told how many tokens each answer has at most.
        """
        found: list[Tokens] = [[] for _ in prompts]
        self._prompted = []
        active = list(range(len(prompts)))
        while active:
            texts = [[*prompts[number], *found[number]] for number in active]
            places = [len(found[number]) for number in active]
            if images:
                self._prompted = [
                    Prompted(len(prompts[number]), images[number]) for number in active
                ]
            chosen = self._next_tokens(texts, sampling, numbers=active, places=places)
            for number, token in zip(active, chosen, strict=True):
                found[number].append(token)
            on_token(max(places) + 1)
            active = [
                number
                for number in active
                if found[number][-1] != NO_TOKEN and not is_done(number, found[number])
            ]
        return found

    def _next_tokens(
        self,
        texts: Sequence[Tokens],
        sampling: Sampling,
        *,
        numbers: Sequence[int],
        places: Sequence[int],
    ) -> list[int]:
        """Return the next token of each text; ``numbers`` and ``places`` key its random numbers."""
        batch = make_batch(
            global_batch_size=len(texts),
            micro_batch_size=self._plan.batch.micro_batch_size,
            dp=self._plan.grid.dp,
        )
        self._rows.show(texts, self._prompted)
        loader = self._image_loader if self._prompted else self._loader
        micro_batches = loader.micro_batches(batch, self._rows.first)
        k = sampling.num_candidates(self._vocab_size)
        found = self._forward.run(partial(StageModule.top_tokens, k=k), micro_batches)
        # a text's last token is on one context-parallel rank of the last stage: together all ranks know it
        chosen = torch.zeros(len(texts), dtype=torch.int64)
        for micro_batch, (logits, ids) in zip(micro_batches, found, strict=False):
            is_here = (micro_batch.labels > 0).any(1)
            at = micro_batch.samples[is_here].cpu() - self._rows.first
            if len(at) and self._groups.tp.index == 0:
                chosen[at] = choose_tokens(
                    logits.cpu(),
                    ids.cpu(),
                    sampling,
                    prompts=torch.tensor(numbers)[at],
                    places=torch.tensor(places)[at],
                )
        return list(all_reduce(chosen.to(self._device), self._groups.world).tolist())
