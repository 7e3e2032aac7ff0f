"""Span corruption (T5, Raffel et al. 2020): rows of what an encoder reads and what a decoder predicts.

Spans of a document are replaced by sentinels, and the decoder writes each sentinel and its span. All is drawn by
keys of seed, split, sample and document, so every layout and every attempt has the same. Documents are corrupted
one by one, so no span crosses from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from raymega.config.encoder import SpanCorruptionSection
from raymega.config.schema import Job, ModelSection
from raymega.data.rows import Ints, Row, empty_row
from raymega.plan.layers.encoder_decoder import corrupted_lengths, num_noise
from raymega.plan.layers.family_parts import parts_of

PADDING = -1
"""Document of tokens that no token of a document sees."""
GEOMETRIC_P = 0.2
"""Chance that a span of random length ends with each of its tokens, as in SpanBERT."""
LEAST_TOKENS = 2
"""Tokens of the shortest document that keeps a token and loses one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanCorruption:
    """Rule by which the rows of a split are corrupted.

    Attributes:
        section: Numbers of the rule, as ``data.span_corruption``.
        lengths: Tokens of a row that the encoder and the decoder read.
        name: Seed of the run and name of the split, which begin all keys.
    """

    section: SpanCorruptionSection
    lengths: tuple[int, int]
    name: str

    def filled(self, text_len: float) -> float:
        """Return the share of a row that a text of ``text_len`` tokens fills."""
        return sum(corrupted_lengths(self.section, max(LEAST_TOKENS, round(text_len)))) / sum(
            self.lengths
        )

    def row(self, texts: Sequence[Ints], sample: int) -> Row:
        """Return the row of a sample's documents.

        A document of which a side has no room loses its last tokens, or is left out.

        Args:
            texts: Tokens of each document.
            sample: Number of the sample in the run.
        """
        size = sum(self.lengths)
        tokens, labels, positions = (np.zeros(size, dtype=np.int64) for _ in range(3))
        mask, documents = np.zeros(size, dtype=np.bool_), np.full(size, PADDING, dtype=np.int64)
        # next free place of each side, and the end of its room
        at, ends = [0, self.lengths[0]], [self.lengths[0], size]
        for number, text in enumerate(texts):
            parts = self._fitting(
                text,
                [end - place for place, end in zip(at, ends, strict=True)],
                self._random(sample, number),
            )
            if parts is None:
                continue
            source, target = parts
            # the decoder reads each token of its target one place later
            read = np.concatenate(([self.section.decoder_start_token_id], target[:-1]))
            for side, values in enumerate((source, read)):
                here = slice(at[side], at[side] + len(values))
                tokens[here], positions[here] = values, np.arange(len(values))
                documents[here] = number
            labels[at[1] : at[1] + len(target)] = target
            mask[at[1] : at[1] + len(target)] = True
            at = [at[0] + len(source), at[1] + len(target)]
        return Row(
            tokens=tokens, labels=labels, mask=mask, documents=self.lengths,
            stream_documents=documents, stream_positions=positions,
        )  # fmt: skip

    def _fitting(
        self, text: Ints, room: Sequence[int], random: np.random.Generator
    ) -> tuple[Ints, Ints] | None:
        """Return source and target of the longest begin of a text that fits; None where none does."""
        length = len(text)
        while length >= LEAST_TOKENS:
            most = corrupted_lengths(self.section, length)
            if all(size <= free for size, free in zip(most, room, strict=True)):
                return self._corrupt(text[:length], room[1], random)
            length -= 1
        return None

    def _corrupt(self, text: Ints, room: int, random: np.random.Generator) -> tuple[Ints, Ints]:
        """Return what the encoder reads of a text, and what the decoder predicts, of ``room`` tokens at most."""
        if self.section.span_lengths == "segments":
            spans = self.segments(len(text), random)
        else:
            spans = self.geometric(len(text), room, random)
        source, target, done = list[Ints](), list[Ints](), 0
        for index, (start, stop) in enumerate(spans):
            sentinel = np.array([self.section.first_sentinel_id - index])
            source += [text[done:start], sentinel]
            target += [sentinel, text[start:stop]]
            done = stop
        end = np.array([self.section.eos_token_id])
        return np.concatenate([*source, text[done:], end]), np.concatenate([*target, end])

    def segments(self, length: int, random: np.random.Generator) -> list[tuple[int, int]]:
        """Return T5's spans [start, stop) in order: a fixed number of them, of random lengths, after random gaps."""
        noise, count = num_noise(self.section, length)
        lengths = _partition(noise, count, random)
        gaps = _partition(length - noise, count, random)
        stops = np.cumsum(gaps + lengths)
        return [*zip((stops - lengths).tolist(), stops.tolist(), strict=True)]

    def geometric(
        self, length: int, room: int, random: np.random.Generator
    ) -> list[tuple[int, int]]:
        """Return Megatron's spans [start, stop) in order, of ``room`` tokens with sentinels and end at most.

        Places are tried in random order. A span that would exceed the share is shortened; one that overlaps
        another is left out.
        """
        section, chosen = self.section, np.zeros(length, dtype=np.bool_)
        budget = max(1, round(length * section.noise_density))
        # inverse of the geometric distribution
        drawn = 1 + np.floor(np.log1p(-random.random(length)) / np.log1p(-GEOMETRIC_P))
        found = list[tuple[int, int]]()
        for start in random.random(length).argsort(kind="stable").tolist():
            done = int(chosen.sum())
            if done >= budget or len(found) >= section.num_sentinels:
                break
            size = int(min(drawn[start], section.max_span_length, length - start, budget - done))
            if chosen[start : start + size].any() or done + size + len(found) + 2 > room:
                continue
            chosen[start : start + size] = True
            found.append((start, start + size))
        return sorted(found)

    def _random(self, sample: int, document: int) -> np.random.Generator:
        key = blake2b(f"{self.name}/{sample}/{document}".encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def _partition(total: int, count: int, random: np.random.Generator) -> Ints:
    """Return ``count`` sizes of at least 1 that add up to ``total``, each choice of them equally likely."""
    cuts = np.sort(random.random(total - 1).argsort(kind="stable")[: count - 1]) + 1
    return np.diff(np.concatenate(([0], cuts, [total]))).astype(np.int64)


def span_corruption_of(job: Job, split: str) -> SpanCorruption | None:
    """Return the rule of a job's split; None where the model is no encoder-decoder."""
    if not parts_of(job.model).is_encoder_decoder:
        return None
    decoder = job.model.encoder_decoder.decoder_seq_len
    return SpanCorruption(
        section=job.data.span_corruption,
        lengths=(job.data.seq_len - decoder, decoder),
        name=f"{job.run.seed}/spans/{split}",
    )


def empty_row_of(model: ModelSection) -> Callable[[int], Row]:
    """Return the function from S to the row of a slot without a sample."""
    if not parts_of(model).is_encoder_decoder:
        return empty_row
    decoder = model.encoder_decoder.decoder_seq_len

    def empty(seq_len: int) -> Row:
        zeros = np.zeros(seq_len, dtype=np.int64)
        return replace(
            empty_row(seq_len), documents=(seq_len - decoder, decoder), stream_documents=zeros + PADDING,
            stream_positions=zeros,
        )  # fmt: skip

    return empty
