"""Task ``images``: rows of images and text, their loss, exact answers and choices, all together and by set.

A file holds JSON objects as `raymega data prepare --format images` reads them: ``text`` with a mark ``<image>`` for each of
``images``, behind an optional ``prompt``. ``choices`` with ``answer``, an index or a letter from A, take the place of ``text``:
the likeliest is chosen. An image is a path, relative to the file, or base64. ``set`` names a part that is told by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raymega.config.vision.section import VisionSection
from raymega.config.vision.sizes import ImageSizes
from raymega.data.images.files import BrokenImageError, read_image, with_patches
from raymega.data.rows import Pixels
from raymega.errors import ConfigError, Fault
from raymega.evaluate.requests import Request, Scores, make_request
from raymega.evaluate.tasks.json_lines import read_objects
from raymega.evaluate.tasks.task import Questions, Settings, TextTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageQuestion:
    """Row of a file.

    Attributes:
        place: File and line.
        part: Name of the row's set; empty without one.
        prompt: Text before the answers.
        answers: The text alone, or the choices.
        right: Index of the right choice; -1 where the answer is a text.
        images: Pixels of its images.
    """

    place: str
    part: str
    prompt: str
    answers: tuple[str, ...]
    right: int
    images: tuple[Pixels, ...]


def read_questions(path: Path, sizes: ImageSizes) -> Iterator[ImageQuestion]:
    """Yield the rows of a file, with images that are resized by the rule of ``sizes``.

    Raises:
        ConfigError: A row is in another form, or an image of it is broken.
    """
    for place, found in read_objects(path):
        try:
            yield _question(place, found, path.parent, sizes)
        except (KeyError, TypeError, ValueError, BrokenImageError) as error:
            raise ConfigError(
                Fault(
                    fact=f"{place} is no row with images: {type(error).__name__}: {error}",
                    rule="it has images, and text, or choices with an answer; each image has a mark <image>",
                    remedy="correct the line",
                )
            ) from error


def _question(
    place: str, found: Mapping[str, Any], folder: Path, sizes: ImageSizes
) -> ImageQuestion:
    has_choices = found.get("choices") is not None
    answers = [*_list(found, "choices")] if has_choices else [found["text"]]
    if not all(isinstance(each, str) for each in answers):
        raise TypeError(f"{'choices' if has_choices else 'text'} is {answers!r:.60}, no text")
    return ImageQuestion(
        place=place,
        part=_part(_optional_text(found, "set")),
        prompt=_optional_text(found, "prompt"),
        answers=tuple(answers),
        right=_index(found["answer"], len(answers)) if has_choices else -1,
        images=tuple(
            read_image(each, folder, sizes, purpose="--task images")
            for each in _list(found, "images")
        ),
    )


def _part(name: str) -> str:
    """Return the name of a row's set, which is a part of metrics' names in every tracker."""
    if not re.fullmatch(r"[\w. :-]*", name):
        raise ValueError(
            f"set is {name!r:.60}; its characters are letters, digits, spaces, _ . : -"
        )
    return name


def _optional_text(found: Mapping[str, Any], name: str) -> str:
    """Return a text of a row; a key without a value is one that is left out."""
    value = found.get(name)
    if not isinstance(value, str | None):
        raise TypeError(f"{name} is {value!r:.60}, no text")
    return value or ""


def _list(found: Mapping[str, Any], name: str) -> list[Any]:
    value = found.get(name)
    # a text would be read letter by letter
    if not isinstance(value, list | None):
        raise TypeError(f"{name} is {value!r:.60}, no list")
    return value or []


def _index(answer: object, count: int) -> int:
    number = ord(answer) - ord("A") if isinstance(answer, str) and len(answer) == 1 else answer
    if not isinstance(number, int) or not 0 <= number < count:
        raise ValueError(f"answer {answer!r} of {count} choices")
    return number


def images(path: Path, tokenizer: TextTokenizer, settings: Settings) -> Questions:
    """Return a request for each answer of each row; see the module."""
    vision = settings.vision
    if not vision.is_on:
        raise ConfigError(
            Fault(
                fact="--task images with model.vision.kind=none",
                rule="the model reads text alone",
                remedy="give --task perplexity, or a checkpoint with a vision tower",
            )
        )
    rows, requests = list[ImageQuestion](), list[Request]()
    for row in read_questions(path, vision.sizes):
        if 0 < settings.limit <= len(rows):
            break
        rows.append(row)
        for answer in row.answers:
            requests.append(_request(row, answer, tokenizer, settings))

    def judge(scores: Sequence[Scores]) -> tuple[Mapping[str, float], list[dict[str, object]]]:
        samples = list[dict[str, object]]()
        # scores lie row after row, an answer each
        at = 0
        for row in rows:
            own = slice(at, at + len(row.answers))
            samples.append(_judged(row, requests[own], scores[own], vision))
            at = own.stop
        metrics = _means(samples)
        for part in sorted({row.part for row in rows if row.part}):
            of_part = _means([each for each in samples if each["set"] == part])
            metrics |= {f"{part}/{name}": value for name, value in of_part.items()}
        return metrics, samples

    return Questions(requests=requests, judge=judge, documents=len(rows))


def _request(
    row: ImageQuestion, answer: str, tokenizer: TextTokenizer, settings: Settings
) -> Request:
    """Return the request of an answer behind its prompt, with the end of the text."""
    token_id, sizes = settings.vision.image_token_id, settings.vision.sizes
    marked = [[*tokenizer.marked_ids(part, token_id)] for part in (row.prompt, answer)]
    # what a choice or a text spells may be the mark, too; the prompt's images are the first
    before, marks = (sum(part.count(token_id) for part in marked[:count]) for count in (1, 2))
    own = (row.images[:before], row.images[before:])
    prompt, text = (
        with_patches(part, token_id, images, sizes)
        for part, images in zip(marked, own, strict=True)
    )
    end = [] if tokenizer.eod_id is None or row.right >= 0 else [tokenizer.eod_id]
    tokens = [*prompt, *text, *end]
    if marks != len(row.images) or len(tokens) < 2 or not [*text, *end]:
        raise ConfigError(
            Fault(
                fact=f"{row.place} has {len(row.images)} images, {marks} marks <image> and {len(tokens)} tokens, "
                f"{len(text) + len(end)} of them an answer's",
                rule="each image has a mark in prompt or text, and a row has two tokens or more, of which one is the answer's",
                remedy="correct the line",
            )
        )
    return make_request(
        tokens,
        len(text) + len(end),
        seq_len=settings.seq_len,
        images=row.images,
        vision=settings.vision,
    )


def _judged(
    row: ImageQuestion, requests: Sequence[Request], scores: Sequence[Scores], vision: VisionSection
) -> dict[str, object]:
    """Return the record of a row from the scores of its answers; tokens of patches are no labels."""
    # of each answer: log-probability, labels, and whether greedy decoding writes it
    sums, counts, exact = list[float](), list[int](), list[bool]()
    for request, found in zip(requests, scores, strict=True):
        is_text = request.tokens[-request.num_targets :] != vision.image_token_id
        sums.append(float(found.log_probs[is_text].sum()))
        counts.append(int(is_text.sum()))
        exact.append(bool(found.is_greedy[is_text].all()))
    judged: dict[str, object] = {"set": row.part, "log_probs": sums}
    if row.right < 0:
        return judged | {"tokens": counts[0], "exact": exact[0]}
    per_byte = np.array(sums) / [max(1, len(answer.encode())) for answer in row.answers]
    chosen = {"chosen": int(np.argmax(sums)), "chosen_per_byte": int(per_byte.argmax())}
    return judged | chosen | {"answer": row.right}


def _means(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return loss and exact matches of rows with a text, and accuracies of those with choices."""
    texts = [each for each in samples if "exact" in each]
    choices = [each for each in samples if "answer" in each]
    metrics = dict[str, float]()
    if texts:
        count = sum(each["tokens"] for each in texts)
        metrics["loss"] = -sum(each["log_probs"][0] for each in texts) / max(1, count)
        metrics["exact_match"] = sum(each["exact"] for each in texts) / len(texts)
    for name, key in (("accuracy", "chosen"), ("accuracy_per_byte", "chosen_per_byte")):
        if choices:
            metrics[name] = sum(each[key] == each["answer"] for each in choices) / len(choices)
    return metrics
