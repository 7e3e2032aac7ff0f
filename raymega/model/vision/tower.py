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

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Map x [N, T, D] of N images to the same shape; ``turns`` rotate queries and keys, [T, K/2] each."""
        q, k, v = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=2)
        )
        if turns is not None:
            q, k = _turned(q, *turns), _turned(k, *turns)
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.activation(self.up(self.mlp_norm(x))))


def _turns(
    vision: VisionSection, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of each patch, [grid * grid, K/2]: half of the pairs rotate by row, half by column."""
    width = vision.hidden_size // vision.num_heads // 2
    pairs = torch.arange(0, width, 2, dtype=torch.float64, device=device)
    at = torch.arange(vision.grid, dtype=torch.float64, device=device)
    angles = at[:, None] * ROPE_BASE ** (-pairs / width)
    rows, columns = angles.repeat_interleave(vision.grid, 0), angles.repeat(vision.grid, 1)
    both = torch.cat((rows, columns), 1)
    return both.cos().to(dtype), both.sin().to(dtype)


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

    def forward(self, pixels: Tensor) -> Tensor:
        """Map pixels [N, 3, height, width] uint8 to features [N * P, D] of the language model."""
        # a convolution whose stride is its size is a product with each patch
        weight = self.patches
        if not self.vision.has_positions:  # both frames of an image are alike
            weight = weight.unflatten(1, (CHANNELS, FRAMES)).sum(2)
        x = linear(self._cut(pixels), weight.flatten(1), self.patch_bias)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(len(x), 1, -1), x), dim=1)
        x = self.pre_norm(x if self.positions is None else x + self.positions)
        for block in self.layers[: self.vision.used_layers]:
            if self.is_remade and torch.is_grad_enabled():
                x = checkpoint(block, x, self.turns, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, self.turns)
        # its part is done: the patches have read it
        x = self._merged(x[:, int(self.vision.has_class_token) :]).flatten(0, 1)
        return self.projector_down(self.activation(self.projector_up(x)))

    def _merged(self, x: Tensor) -> Tensor:
        """Normalise and merge squares of patches, [N, grid * grid, D] -> [N, P, D * merge^2], row after row."""
        if self.merge_norm is None:
            return x
        edges = (self.vision.edge, self.vision.spatial_merge_size)
        # rows, row inside a square, columns, column inside it
        squares = self.merge_norm(x).unflatten(1, (self.vision.grid, self.vision.grid))
        squares = squares.unflatten(2, edges).unflatten(1, edges)
        return squares.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)

    def _cut(self, pixels: Tensor) -> Tensor:
        """Return the normalised patches of images, [N, P, 3 * patch * patch], row after row of the image."""
        vision, colours = (
            self.vision,
            zip(self.vision.image_mean, self.vision.image_std, strict=True),
        )
        # rounded once, behind the mean: in bfloat16 a difference of near numbers has lost its digits
        wide = torch.promote_types(self.dtype, torch.float32)
        # numbers of Python: a tensor of them would be copied to the device in each forward
        x = torch.stack(
            [
                ((pixels[:, colour].to(wide) / WHITE - mean) / std).to(self.dtype)
                for colour, (mean, std) in enumerate(colours)
            ],
            dim=1,
        )
        edges = (vision.grid, vision.patch_size)
        cut = x.unflatten(3, edges).unflatten(2, edges)  # [N, 3, rows, patch, columns, patch]
        return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
