"""Checks that the rows of a dataset have the form that a job reads, and the images that its model reads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raymega.config.data import is_computed
from raymega.config.vision.section import VisionSection
from raymega.config.vision.sizes import ImageSizes
from raymega.data.arrow import TokenStream
from raymega.data.format import RowFormat, local_folder
from raymega.data.megatron import is_megatron
from raymega.data.rows import RowForm
from raymega.data.streaming.remote_dataset import is_remote, meta_at
from raymega.errors import Fault

FORMATS: dict[str, RowFormat] = {
    "pairs": "preference", "classes": "classification", "values": "regression", "choices": "multiple_choice",
    "tokens": "token_classification", "answers": "kto", "matches": "embedding",
}  # fmt: skip
"""Format of the datasets, as of `raymega data prepare --format`, that a form of rows is read from."""


PORTION = 2**22
"""Number of labels that are looked at together."""


def label_faults(path: str, form: RowForm) -> Iterator[Fault]:
    """Yield the fault of a dataset, in a folder and of the form that the job reads, with a label that the head lacks.

    All labels are read, a byte a token; what is in an object store is told when its row is read.
    """
    has_limit = form.kind == "choices" or form.num_classes > 0
    if not has_limit or is_computed(path) or is_megatron(path) or is_remote(path):
        return
    targets = _targets(path)
    found = max(targets)
    # a class is its byte less 1; of a choice the byte has the number of choices times 2
    others = sorted({each // 2 for each in targets} - {form.size})
    if form.kind == "choices" and others:
        yield Fault(
            fact=f"{path} has a question with {others[-1]} choices",
            rule=f"model.head.num_choices={form.size}, and a question's choices are scored together",
            remedy=f"set model.head.num_choices={others[-1]}, and prepare questions of one number of choices",
        )
    elif form.num_classes and found > form.num_classes:
        yield Fault(
            fact=f"{path} has the label {found - 1}",
            rule=f"model.head.num_labels={form.num_classes} has classes 0 to {form.num_classes - 1}",
            remedy=f"set model.head.num_labels={found} or more",
        )


def _targets(path: str) -> set[int]:
    """Return the different bytes beside the tokens of a dataset's splits."""
    found: set[int] = set()
    for split in meta_at(path).splits.values():
        stream = TokenStream(local_folder(path), split)
        for start in range(0, stream.num_tokens, PORTION):
            stop = min(start + PORTION, stream.num_tokens)
            counts = np.bincount(stream.read_targets(start, stop), minlength=1)
            found |= set(np.flatnonzero(counts).tolist())
    return found


def row_form_faults(path: str, field: str, loss_on: str, form: RowForm) -> Iterator[Fault]:
    """Yield the faults of a dataset, sound by itself, whose rows are of another form than the job needs."""
    if is_computed(path):
        return
    meta = None if is_megatron(path) else meta_at(path)
    found = "text" if meta is None else meta.row_format
    if form.kind == "pairs" and found != "preference":
        yield Fault(
            fact=f"{field}={path!r} holds no pairs of answers",
            rule="a job with preference.loss_type trains on pairs of a chosen and a rejected answer",
            remedy="prepare it with --format preference, or set preference.loss_type=none",
        )
    elif form.kind == "texts" and found == "preference":
        yield Fault(
            fact=f"{field}={path!r} holds pairs of a chosen and a rejected answer",
            rule="a run of this job would learn the rejected ones too",
            remedy="set preference.loss_type=sigmoid, or prepare the chosen ones with --format chat --text-key chosen",
        )
    elif form.kind in FORMATS and found != FORMATS[form.kind]:
        yield Fault(
            fact=f"{field}={path!r} was prepared with --format {found}",
            rule=f"this job reads labels of rows that --format {FORMATS[form.kind]} prepares",
            remedy=f"prepare it with --format {FORMATS[form.kind]}, or change model.head or preference.loss_type",
        )
    elif form.kind == "texts" and found not in ("text", "chat", "images"):
        yield Fault(
            fact=f"{field}={path!r} was prepared with --format {found}",
            rule="a language model's loss reads no labels",
            remedy="set model.head.kind or preference.loss_type, or prepare it with --format text",
        )
    if loss_on in ("assistant", "completion") and not (meta and meta.has_targets):
        yield Fault(
            fact=f"data.loss_on={loss_on}, and {field}={path!r} holds texts",
            rule="only conversations say what the assistant writes",
            remedy="set data.loss_on=auto, or prepare it with --format chat",
        )


def image_faults(path: str, field: str, vision: VisionSection) -> Iterator[Fault]:
    """Yield the fault of a dataset, sound by itself, whose images are not those of the model's vision tower."""
    meta = None if is_computed(path) or is_megatron(path) else meta_at(path)
    if meta is None or meta.images is None:
        return
    images = meta.images
    if not vision.is_on:
        yield Fault(
            fact=f"{field}={path!r} holds images, and model.vision.kind=none",
            rule="their tokens would be read as text",
            remedy="set model.vision, or prepare the text alone with --format text",
        )
        return
    found, read = (images.sizes, images.token_id), (vision.sizes, vision.image_token_id)
    if found != read:
        options = f"--image-size {vision.image_size}"
        if vision.max_pixels:
            options = f"--min-pixels {vision.min_pixels} --max-pixels {vision.max_pixels}"
        yield Fault(
            fact=f"{field}={path!r} holds images of {_told(images.sizes)} tokens with id {images.token_id}",
            rule=f"model.vision reads those of {_told(vision.sizes)} tokens with id {vision.image_token_id}",
            remedy=f"prepare it with {options} --patch-size {vision.sizes.square} and the model's "
            f"tokenizer, or set model.vision.image_token_id={images.token_id} and its sizes",
        )


def _told(sizes: ImageSizes) -> str:
    """Return the sizes of images for a message."""
    if not sizes.max_pixels:
        return f"{sizes.image_size} pixels, each {sizes.num_patches}"
    return (
        f"{sizes.min_pixels} to {sizes.max_pixels} pixels in all, each at most {sizes.num_patches}"
    )
