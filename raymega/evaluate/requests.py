"""Requests of an evaluation: token sequences whose last tokens are to be scored, and the rows that hold them.

A request's score depends on its own tokens only, so requests share rows: attention does not cross the border
between two of them.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm

import numpy as np
import numpy.typing as npt

from raymega.config.vision.section import VisionSection
from raymega.config.vision.sizes import NO_IMAGES, ImageSizes
from raymega.data.images.files import held_image, patch_places
from raymega.data.packing import best_fit
from raymega.data.rows import TEXT, Image, Pixels, Row
from raymega.errors import Fault
from raymega.plan.batch import row_length
from raymega.plan.run_plan import RunPlan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Tokens to be scored.

    Attributes:
        tokens: Context and targets, at least two.
        num_targets: Number of tokens at the end that are scored, each given all tokens before it.
        images: Images of the text.
        places: Feature of each token, as `Row.image_places`; None without images.
    """

    tokens: Ints
    num_targets: int
    images: tuple[Pixels, ...] = ()
    places: Ints | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Scores of a request's targets.

    Attributes:
        log_probs: Log-probability of each target in nats, [num_targets].
        is_greedy: True where the target is the model's likeliest token, [num_targets].
    """

    log_probs: Floats
    is_greedy: npt.NDArray[np.bool_]


def make_request(
    tokens: Sequence[int] | Ints,
    num_targets: int,
    *,
    seq_len: int,
    images: Sequence[Pixels] = (),
    vision: VisionSection = VisionSection(),  # noqa: B008  # it is frozen
) -> Request:
    """Return a request of at most ``seq_len`` inputs: of a longer one, the tokens before are cut off.

    At least the targets' last ``seq_len`` stay, as the first token of a request cannot be scored.

    Args:
        tokens: Context and targets.
        num_targets: Number of targets.
        seq_len: Largest number of inputs.
        images: Images of the text, in the order of its patches.
        vision: Section of the tower that reads them.
    """
    whole = np.asarray(tokens, dtype=np.int64)
    kept = whole[-(seq_len + 1) :]
    # of an image that is cut, the patches that stay keep their places
    places = None
    if images:
        places = patch_places(whole, vision.image_token_id, images, vision.sizes)[-(seq_len + 1) :]
    return Request(
        tokens=kept,
        num_targets=min(num_targets, len(kept) - 1),
        images=tuple(images),
        places=places,
    )


def request_multiple(plan: RunPlan) -> int:
    """Return the multiple to which a grid pads each request's inputs: context parallelism cuts them."""
    return lcm(plan.job.data.document_multiple, 2 * plan.grid.cp if plan.grid.cp > 1 else 1)


def pack_requests(requests: Sequence[Request]) -> bytes:
    """Return requests as bytes, for :func:`unpack_requests`."""
    file = io.BytesIO()
    # an image of several requests is sent once
    known: dict[int, int] = {}
    pixels = list[Pixels]()
    for image in (image for request in requests for image in request.images):
        if known.setdefault(id(image), len(pixels)) == len(pixels):
            pixels.append(image)
    places = [_no_places(each) if each.places is None else each.places for each in requests]
    # Windows over a text share most of their tokens: compressed they are a tenth and less.
    np.savez_compressed(
        file,
        tokens=np.concatenate([request.tokens for request in requests]).astype(np.uint32),
        lengths=np.array([len(request.tokens) for request in requests]),
        num_targets=np.array([request.num_targets for request in requests]),
        places=np.concatenate(places).astype(np.int32),
        pixels=np.concatenate([np.zeros(0, dtype=np.uint8), *(each.ravel() for each in pixels)]),
        shapes=np.array([each.shape for each in pixels], dtype=int).reshape(-1, 3),
        images=np.array([known[id(image)] for each in requests for image in each.images], int),
        num_images=np.array([len(each.images) for each in requests]),
    )
    return file.getvalue()


def unpack_requests(data: bytes) -> list[Request]:
    """Return the requests of :func:`pack_requests`."""
    with np.load(io.BytesIO(data)) as arrays:
        tokens, lengths = arrays["tokens"].astype(np.int64), arrays["lengths"]
        ends = np.cumsum(lengths)[:-1]
        parts, targets = np.split(tokens, ends), arrays["num_targets"].tolist()
        places = np.split(arrays["places"].astype(np.int64), ends)
        # views of one array: requests of the same image share it
        shapes = arrays["shapes"]
        flat = np.split(arrays["pixels"], np.cumsum(shapes.prod(1))[:-1]) if len(shapes) else []
        pixels = [each.reshape(shape) for each, shape in zip(flat, shapes, strict=True)]
        numbers = np.split(arrays["images"], np.cumsum(arrays["num_images"])[:-1])
    return [
        Request(
            tokens=tokens,
            num_targets=count,
            images=tuple(pixels[number] for number in own),
            places=at if len(own) else None,
        )
        for tokens, count, at, own in zip(parts, targets, places, numbers, strict=True)
    ]


def pack_scores(log_probs: Iterable[Floats], is_greedy: Iterable[npt.NDArray[np.bool_]]) -> bytes:
    """Return the scores of all requests, in their order, as bytes for :func:`unpack_scores`."""
    file = io.BytesIO()
    np.savez(file, log_probs=np.concatenate([*log_probs]), is_greedy=np.concatenate([*is_greedy]))
    return file.getvalue()


def unpack_scores(data: bytes, requests: Sequence[Request]) -> list[Scores]:
    """Return the scores of each request."""
    ends = np.cumsum([request.num_targets for request in requests])[:-1]
    with np.load(io.BytesIO(data)) as arrays:
        log_probs, is_greedy = (np.split(arrays[name], ends) for name in ("log_probs", "is_greedy"))
    return [Scores(log_probs=a, is_greedy=b) for a, b in zip(log_probs, is_greedy, strict=True)]


def score_faults(scores: Sequence[Scores]) -> Iterator[Fault]:
    """Yield a fault for the first request with a score that is no finite number: a task would count it as wrong."""
    for number, each in enumerate(scores):
        if not (finite := np.isfinite(each.log_probs)).all():
            yield Fault(
                fact=f"the log-probability of target {int(finite.argmin()) + 1} of request {number + 1} of "
                f"{len(scores)} is NaN or Inf",
                rule="what is judged are finite numbers",
                remedy="give --set precision.dtype=float32, or take an earlier checkpoint",
            )
            return


def by_tokens(requests: Sequence[Request]) -> list[list[int]]:
    """Return the numbers of the requests, those with the same tokens and images together.

    They are read once: a task may ask for several ends of one text, such as a word and its last token.
    """
    found: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}
    for number, request in enumerate(requests):
        # the last place differs where an image is cut off at the front
        first = () if request.places is None else (int(request.places.max()),)
        own = (*map(id, request.images), *first)
        found.setdefault((request.tokens.tobytes(), own), []).append(number)
    return list(found.values())


def rows_on_grid(requests: Sequence[Request], plan: RunPlan) -> RequestSource:
    """Return the rows in which a grid reads ``requests``: of S tokens, or fewer where one such row holds all."""
    multiple = request_multiple(plan)
    lengths = [len(requests[numbers[0]].tokens) - 1 for numbers in by_tokens(requests)]
    needed = sum(-(-length // multiple) * multiple for length in lengths)
    return RequestSource(
        requests,
        seq_len=row_length(needed, plan.job),
        multiple=multiple,
        sizes=plan.job.model.vision.sizes,
    )


class RequestSource:
    """Rows of S tokens that hold the requests' inputs, packed by best fit, for `raymega.data.loader`.

    Requests with the same tokens have one place.

    Args:
        requests: Requests of at most S inputs each.
        seq_len: Number of tokens of a row (S).
        multiple: Multiple to which each request's inputs are padded.
        sizes: Rule of the sizes of images.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        seq_len: int,
        multiple: int = 1,
        sizes: ImageSizes = NO_IMAGES,
    ) -> None:
        self._requests, self.seq_len, self._sizes = requests, seq_len, sizes
        self._shared = by_tokens(requests)
        inputs = [len(requests[numbers[0]].tokens) - 1 for numbers in self._shared]
        self._lengths = [-(-each // multiple) * multiple for each in inputs]
        self._rows = best_fit(self._lengths, seq_len)
        self.num_rows = len(self._rows)
        # place in its row of each request's first input
        self._starts: dict[int, int] = {}
        for texts in self._rows:
            ends = accumulate((self._lengths[text] for text in texts), initial=0)
            for text, start in zip(texts, ends, strict=False):
                self._starts |= dict.fromkeys(self._shared[text], start)

    def row(self, index: int) -> Row:
        """Return row ``index``: its requests end to end, then padding as a document of its own."""
        tokens, labels = np.zeros((2, self.seq_len), dtype=np.int64)
        mask = np.zeros(self.seq_len, dtype=np.bool_)
        for number in self.members(index):
            request, start = self._requests[number], self._starts[number]
            stop = start + len(request.tokens) - 1
            tokens[start:stop], labels[start:stop] = request.tokens[:-1], request.tokens[1:]
            mask[self.targets(number)] = True
        documents = [self._lengths[text] for text in self._rows[index]]
        rest = self.seq_len - sum(documents)
        images, places = self._images(index)
        return Row(
            tokens=tokens,
            labels=labels,
            mask=mask,
            documents=tuple([*documents, rest] if rest else documents),
            images=images,
            image_places=places,
        )

    def _images(self, index: int) -> tuple[tuple[Image, ...], Ints | None]:
        """Return the images of row ``index``, end to end, and the feature of each of its tokens, None of texts."""
        images, places = list[Image](), np.full(self.seq_len, TEXT, dtype=np.int64)
        for text in self._rows[index]:
            number = self._shared[text][0]
            request, start = self._requests[number], self._starts[number]
            if request.places is None:
                continue
            own, first = request.places[:-1], len(images) * self._sizes.num_patches
            places[start : start + len(own)] = np.where(own == TEXT, TEXT, own + first)
            images += [held_image(image, self._sizes) for image in request.images]
        return tuple(images), places if images else None

    def members(self, index: int) -> list[int]:
        """Return the numbers of the requests in row ``index``."""
        return [number for text in self._rows[index] for number in self._shared[text]]

    def targets(self, number: int) -> slice:
        """Return the positions, in its row, that predict the targets of request ``number``."""
        request = self._requests[number]
        stop = self._starts[number] + len(request.tokens) - 1
        return slice(stop - request.num_targets, stop)


def _no_places(request: Request) -> Ints:
    return np.full(len(request.tokens), TEXT, dtype=np.int64)
