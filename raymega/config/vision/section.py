"""The job file's model.vision section: the tower that reads images, and the projector behind it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.encoder import NO_TOKEN, TokenId
from raymega.config.fields import Fraction, NonNegative, Positive, PositiveFloat, Section
from raymega.config.vision.sizes import ImageSizes

CHANNELS = 3
"""Colours of a pixel."""
ONE_EACH = Field(min_length=CHANNELS, max_length=CHANNELS)
Channel = Annotated[float, Field(ge=0, le=1)]
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class VisionSection(Section):
    """Vision tower and projector (LLaVA): each image becomes tokens of the sequence, as many as others or by its size."""

    kind: Literal["none", "clip", "siglip", "qwen2_vl"] = "none"
    """none: the model reads text alone. clip: CLIP's ViT, with a class token that is left out of the output, and a
    norm before the blocks. siglip: SigLIP's, with neither, and a bias of its patches. qwen2_vl: Qwen2-VL's, which rotates queries and keys by row
    and column in place of a table of positions, and merges patches before the projector."""
    # Sizes of the tower.
    image_size: NonNegative = 0
    """Height and width of an image in pixels, after it is resized; 0 with max_pixels."""
    max_pixels: NonNegative = 0
    """qwen2_vl only: largest area of an image in pixels. Each image keeps about its shape and area, in whole tokens
    (smart_resize), and has as many tokens as it has squares of merged patches. 0 resizes all to image_size."""
    min_pixels: NonNegative = 0
    """max_pixels only: least area of an image in pixels; smaller ones are enlarged. An image has one token at least."""
    mean_pixels: NonNegative = 0
    """max_pixels only: mean area of the data's images in pixels, for predictions and counts of FLOPs alone; 0 takes max_pixels."""
    patch_size: NonNegative = 0
    """Height and width of a patch in pixels; each is a token of the sequence, unless patches are merged."""
    num_layers: NonNegative = 0
    """Blocks of the tower, those behind feature_layer included."""
    hidden_size: NonNegative = 0
    """Features of the tower's stream."""
    num_heads: NonNegative = 0
    """Heads of its attention."""
    ffn_hidden_size: NonNegative = 0
    """Features inside its feed-forward layers."""
    activation: Literal["quick_gelu", "gelu", "gelu_tanh"] = "quick_gelu"
    """Nonlinearity of its feed-forward layers. CLIP has quick_gelu, SigLIP gelu_tanh."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance in its norms."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of initial weights of tower and projector."""
    feature_layer: int = -2
    """Block whose output is projected: 1 is the first one's, -1 the last one's, -2 that of the one before. What lies
    behind it is kept and saved, and never trained."""
    spatial_merge_size: Positive = 1
    """qwen2_vl only: patches along each edge of a square that becomes one token. Qwen2-VL has 2."""
    # Images among tokens.
    mrope_section: Annotated[tuple[NonNegative, ...], Field(max_length=3)] = ()
    """M-RoPE: pairs of a head's features that rotate by a token's time, row and column in its image; text has one
    position on all three, and an image moves what follows it by its longer edge in tokens. Empty rotates all by place."""
    image_token_id: TokenId = NO_TOKEN
    """Id of the token that stands in the text for a patch; no label."""
    image_mean: Annotated[tuple[Channel, ...], ONE_EACH] = CLIP_MEAN
    """Mean of each colour, from 0 to 1, that is subtracted from pixels."""
    image_std: Annotated[tuple[PositiveFloat, ...], ONE_EACH] = CLIP_STD
    """Standard deviation of each colour, by which pixels are then divided."""
    tensor_parallel: bool = False
    """Cut the blocks' heads and feed-forward features over parallel.tp, whose ranks then read the same images: each holds
    1/tp of the blocks. Else each tp rank holds the whole tower, and reads images of its own."""
    image_share: Fraction = 0.5
    """Share of the data's tokens that are patches of images, for predictions and counts of FLOPs alone."""

    @property
    def is_on(self) -> bool:
        """True where the model reads images."""
        return self.kind != "none"

    @property
    def sizes(self) -> ImageSizes:
        """Rule by which images are resized."""
        return ImageSizes(
            self.patch_size * self.spatial_merge_size,
            self.image_size,
            self.min_pixels,
            self.max_pixels,
        )

    @property
    def num_patches(self) -> int:
        """P, tokens of an image, of the largest where they differ: its patches, or the squares of patches that are merged."""
        return self.sizes.num_patches

    @property
    def mean_patches(self) -> int:
        """Tokens of the data's mean image, as the job says it."""
        square = max(1, self.sizes.square)
        return max(1, self.mean_pixels // square**2) if self.mean_pixels else self.num_patches

    @property
    def has_class_token(self) -> bool:
        """True where the tower reads a token beside the patches."""
        return self.kind == "clip"

    @property
    def images_per_token(self) -> float:
        """Mean number of images for each token of the data; 0 without a tower."""
        return self.image_share / self.mean_patches if self.num_patches else 0.0

    @property
    def num_positions(self) -> int:
        """Tokens that the tower reads of an image, of the largest where they differ."""
        return self.num_patches * self.spatial_merge_size**2 + self.has_class_token

    @property
    def mrope_edge(self) -> int:
        """Most positions by which an image moves what follows it under M-RoPE; 0 without M-RoPE."""
        if not self.mrope_section:
            return 0
        # the longest image is a token high or wide
        return self.num_patches if self.max_pixels else self.image_size // max(1, self.sizes.square)

    @property
    def merged_size(self) -> int:
        """Features of the patches that become one token."""
        return self.hidden_size * self.spatial_merge_size**2

    @property
    def has_positions(self) -> bool:
        """True where the tower adds a table of positions, and has a norm behind its blocks."""
        return self.kind != "qwen2_vl"

    @property
    def used_layers(self) -> int:
        """Blocks up to feature_layer."""
        layer = self.feature_layer
        return layer + self.num_layers + 1 if layer < 0 else layer
