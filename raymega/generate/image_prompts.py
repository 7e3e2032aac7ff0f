"""Reads the images of prompts, and puts the tokens of their patches into the prompts' tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from raymega.config.vision.section import VisionSection
from raymega.data.images.files import MARK, BrokenImageError, read_image, with_patches
from raymega.data.rows import Pixels
from raymega.data.text_codec import TextCodec
from raymega.errors import ConfigError, Fault, counted, raise_faults
from raymega.generate.prompts import Prompt


class PromptImages(NamedTuple):
    """Images of prompts.

    Attributes:
        vision: Section of the tower that reads them.
        pixels: Pixels of each prompt's images, [3, height, width] uint8; empty where no prompt has one.
    """

    vision: VisionSection
    pixels: Sequence[Sequence[Pixels]]


NO_IMAGES = PromptImages(VisionSection(), ())


def read_images(prompts: Sequence[Prompt], vision: VisionSection, folder: Path) -> PromptImages:
    """Return the images of each prompt.

    Args:
        prompts: Prompts, whose images are paths relative to ``folder``, or base64.
        vision: Section of the model's tower.
        folder: Folder of the prompts' file.

    Raises:
        ConfigError: The model reads no images, or one of them is broken.
    """
    if not any(prompt.images for prompt in prompts):
        return PromptImages(vision, ())
    raise_faults(ConfigError, list(_absence_faults(vision)))
    # every broken image is told at once
    found, faults = list[list[Pixels]](), list[Fault]()
    for number, prompt in enumerate(prompts, start=1):
        found.append([])
        for image in prompt.images:
            try:
                found[-1].append(read_image(image, folder, vision.sizes, purpose="a prompt"))
            except BrokenImageError as error:
                faults.append(
                    Fault(
                        fact=f"prompt {number}: {error}",
                        rule="an image is a file that Pillow reads, or its content as base64",
                        remedy="give the path of an image",
                    )
                )
    raise_faults(ConfigError, faults)
    return PromptImages(vision, found)


def prompt_tokens(
    codec: TextCodec,
    prompts: Sequence[Prompt],
    images: PromptImages,
    *,
    is_rendered: bool = False,
) -> list[list[int]]:
    """Return the tokens of each prompt, with a token for each patch in the place of an image's mark.

    Args:
        codec: Tokenizer of the model.
        prompts: Prompts.
        images: Images of the prompts.
        is_rendered: True if a chat template made the texts, with their first token.

    Raises:
        ConfigError: A prompt has another number of images than of marks.
    """
    vision = images.vision
    if not vision.is_on:
        return [codec.encode(each.text, is_rendered=is_rendered) for each in prompts]
    token, faults, found = vision.image_token_id, list[Fault](), list[list[int]]()
    for number, prompt in enumerate(prompts):
        # a chat template writes the token itself
        ids = codec.encode_marked(prompt.text, token, is_rendered=is_rendered)
        own = images.pixels[number] if images.pixels else ()
        if ids.count(token) != len(own):
            faults.append(
                Fault(
                    fact=f"prompt {number + 1} has {counted(len(own), 'image')} and {counted(ids.count(token), 'mark')} {MARK}",
                    rule=f"each mark, token {token} of the model's tokenizer, stands for an image",
                    remedy=f"write {MARK} into the prompt where each image belongs",
                )
            )
        found.append(with_patches(ids, token, own, vision.sizes))
    raise_faults(ConfigError, faults)
    return found


def _absence_faults(vision: VisionSection) -> Iterator[Fault]:
    if not vision.is_on:
        yield Fault(
            fact="a prompt has images, and model.vision.kind=none",
            rule="the model reads text alone",
            remedy="leave the images out, or give a checkpoint with a vision tower",
        )
