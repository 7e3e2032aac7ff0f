"""Checks that the images of a dataset are those that a job's model reads."""

from __future__ import annotations

from collections.abc import Iterator

from raymega.config.data import is_computed
from raymega.config.vision.section import VisionSection
from raymega.data.megatron import is_megatron
from raymega.data.streaming.remote_dataset import meta_at
from raymega.errors import Fault


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
    found = (images.size, images.num_patches, images.token_id)
    if found != (vision.image_size, vision.num_patches, vision.image_token_id):
        yield Fault(
            fact=f"{field}={path!r} holds images of {images.size} pixels, each {images.num_patches} tokens with id "
            f"{images.token_id}",
            rule=f"model.vision reads {vision.image_size} pixels as {vision.num_patches} tokens with id "
            f"{vision.image_token_id}",
            remedy=f"prepare it with --image-size {vision.image_size} --patch-size {vision.patch_size} and the model's "
            f"tokenizer, or set model.vision.image_token_id={images.token_id} and its sizes",
        )
