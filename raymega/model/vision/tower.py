"""Vision tower (ViT of CLIP's and SigLIP's kinds) and the projector of its patches to the language model's width.

Every rank holds all weights and reads images of its own, or a part of the blocks where tp cuts them. `embedding.py` brings the patches among the tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from raymega.config.vision.section import CHANNELS, VisionSection
from raymega.model.layers.mlp import named_activation
from raymega.model.layers.norms import Norm
from raymega.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    ParameterFactory,
    ReplicatedLinear,
    RowParallelLinear,
)
from raymega.plan.layers.vision import FRAMES, VISION

ROPE_BASE = 10000.0
"""Base of the wavelengths of rows and columns, Qwen2-VL's."""
WHITE = 255.0
"""Largest value of a pixel's colour."""


class VisionBlock(nn.Module):
    """Block of the tower: attention over all tokens of an image, then a feed-forward layer, each behind a norm."""

    def __init__(self, factory: ParameterFactory, at: str, vision: VisionSection) -> None:
        super().__init__()
        norm = partial(Norm, factory, name="layer_norm", eps=vision.norm_eps)
        # a cut tower: its heads and features as the decoder's, on images that all tp ranks read
        is_cut = vision.tensor_parallel
        into: type[ColumnParallelLinear | ReplicatedLinear] = (
            ColumnParallelLinear if is_cut else ReplicatedLinear
        )
        back: type[RowParallelLinear | ReplicatedLinear] = (
            RowParallelLinear if is_cut else ReplicatedLinear
        )
        self.num_heads = vision.num_heads // (factory.tp.size if is_cut else 1)
        self.attention_norm = norm(f"{at}.attention_norm")
        self.qkv = into(factory, *(f"{at}.attention.{name}" for name in "qkv"))
        self.out = back(factory, f"{at}.attention.out")
        self.mlp_norm = norm(f"{at}.mlp_norm")
        self.up = into(factory, f"{at}.mlp.up")
        self.down = back(factory, f"{at}.mlp.down")
        self.activation = named_activation(vision.activation)

    def forward(
        self,
        x: Tensor,
        turns: tuple[Tensor, Tensor] | None = None,
        is_patch: Tensor | None = None,
    ) -> Tensor:
        """Map x [N, T, D] of N images to the same shape.

        Args:
            x: Stream of the images' tokens.
            turns: Cosines and sines that rotate queries and keys, [N, 1, T, K/2] each.
            is_patch: True where a token is a patch of its image, [N, 1, 1, T]; None where all are.
        """
        q, k, v = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=2)
        )
        if turns is not None:
            q, k = _turned(q, *turns), _turned(k, *turns)
        # behind the last patch are queries, whose answers are unread, and no keys
        found = scaled_dot_product_attention(q, k, v, attn_mask=is_patch)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(self.activation(self.up(self.mlp_norm(x))))


def _turns(
    vision: VisionSection, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of each row or column of patches, [L, K/4], for images of any shape."""
    width = vision.hidden_size // vision.num_heads // 2
    pairs = torch.arange(0, width, 2, dtype=torch.float64, device=device)
    # the longest image is one token high
    longest = vision.num_patches * vision.spatial_merge_size
    at = torch.arange(longest, dtype=torch.float64, device=device)
    angles = at[:, None] * ROPE_BASE ** (-pairs / width)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate feature i of x [N, heads, T, K] with feature i + K/2."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class VisionTower(nn.Module):
    """Tower and projector: images to features of the language model's width, P an image.

    With ``is_remade`` backward recomputes each block from its input.
    """

    is_remade = False

    def __init__(self, factory: ParameterFactory, vision: VisionSection) -> None:
        super().__init__()
        self.vision, self.dtype = vision, factory.dtype
        # images are not cut by position, whatever the decoder's stream is
        factory = replace(factory, sp=replace(factory.sp, is_sequence_parallel=False))
        norm = partial(Norm, factory, name="layer_norm", eps=vision.norm_eps)
        self.patches = factory.make(f"{VISION}.patches.weight")
        self.patch_bias = factory.make_if_any(f"{VISION}.patches.bias")
        self.class_token = factory.make_if_any(f"{VISION}.class_token.weight")
        self.positions = factory.make_if_any(f"{VISION}.positions.weight")
        self.turns: tuple[Tensor, Tensor] | None = None
        if not vision.has_positions:
            self.turns = _turns(
                vision, factory.device, torch.promote_types(self.dtype, torch.float32)
            )
        self.pre_norm = norm(f"{VISION}.pre_norm") if vision.has_class_token else nn.Identity()
        # blocks behind the projected one are kept for checkpoints, and never run
        self.layers = nn.ModuleList(
            VisionBlock(factory, f"{VISION}.layers.{layer}", vision)
            for layer in range(vision.num_layers)
        )
        # behind all blocks, and never run; or before patches are merged
        self.post_norm = norm(f"{VISION}.post_norm") if vision.has_positions else None
        self.merge_norm = None if vision.has_positions else norm(f"{VISION}.projector.norm")
        self.projector_up = ReplicatedLinear(factory, f"{VISION}.projector.up")
        self.projector_down = ReplicatedLinear(factory, f"{VISION}.projector.down")
        self.activation = named_activation("gelu")

    def forward(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """Map images to features of the language model, [N * P, D]; those behind an image's last square are of nothing.

        Args:
            pixels: Images in squares that become a token each, [N, P, 3, edge, edge] uint8.
            grids: Rows and columns of each, [N, 2].
        """
        # a convolution whose stride is its size is a product with each patch
        weight = self.patches
        if not self.vision.has_positions:  # both frames of an image are alike
            weight = weight.unflatten(1, (CHANNELS, FRAMES)).sum(2)
        x = linear(self._cut(pixels), weight.flatten(1), self.patch_bias)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(len(x), 1, -1), x), dim=1)
        x = self.pre_norm(x if self.positions is None else x + self.positions)
        turns, is_patch = self._turns_of(grids, pixels.shape[1]), self._is_patch(grids, x.shape[1])
        for block in self.layers[: self.vision.used_layers]:
            if self.is_remade and torch.is_grad_enabled():
                x = checkpoint(
                    block, x, turns, is_patch, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = block(x, turns, is_patch)
        # its part is done: the patches have read it
        x = self._merged(x[:, int(self.vision.has_class_token) :]).flatten(0, 1)
        return self.projector_down(self.activation(self.projector_up(x)))

    def _merged(self, x: Tensor) -> Tensor:
        """Normalise and merge squares of patches, [N, P * merge^2, D] -> [N, P, D * merge^2]."""
        if self.merge_norm is None:
            return x
        return self.merge_norm(x).unflatten(1, (-1, self.vision.spatial_merge_size**2)).flatten(2)

    def _turns_of(self, grids: Tensor, num_patches: int) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines of each patch of images: half of the pairs rotate by row, half by column."""
        if self.turns is None:
            return None
        merge = self.vision.spatial_merge_size
        at, inside = (torch.arange(n, device=grids.device) for n in (num_patches, merge))
        columns = grids[:, 1:]
        # of the square in the image, then of the patch in it: [N, P, merge, merge]
        places = (
            (at // columns)[..., None, None] * merge + inside[:, None],
            (at % columns)[..., None, None] * merge + inside,
        )
        rows, columns = (each.expand(-1, -1, merge, merge).flatten(1) for each in places)
        cos, sin = (torch.cat((table[rows], table[columns]), -1) for table in self.turns)
        return cos[:, None], sin[:, None]

    def _is_patch(self, grids: Tensor, length: int) -> Tensor | None:
        """Return where tokens are patches of their image, [N, 1, 1, T]; None where all images have one size."""
        if not self.vision.max_pixels:
            return None
        count = grids.prod(1, keepdim=True) * self.vision.spatial_merge_size**2
        return (torch.arange(length, device=grids.device) < count)[:, None, None]

    def _cut(self, pixels: Tensor) -> Tensor:
        """Return the normalised patches of images, [N, P * merge^2, 3 * patch * patch], row after row of each square."""
        vision, colours = (
            self.vision,
            zip(self.vision.image_mean, self.vision.image_std, strict=True),
        )
        # rounded once, behind the mean: in bfloat16 a difference of near numbers has lost its digits
        wide = torch.promote_types(self.dtype, torch.float32)
        # numbers of Python: a tensor of them would be copied to the device in each forward
        x = torch.stack(
            [
                ((pixels[:, :, colour].to(wide) / WHITE - mean) / std).to(self.dtype)
                for colour, (mean, std) in enumerate(colours)
            ],
            dim=2,
        )
        edges = (vision.spatial_merge_size, vision.patch_size)
        cut = x.unflatten(4, edges).unflatten(3, edges)  # [N, P, 3, rows, patch, columns, patch]
        return cut.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(1, 3)
