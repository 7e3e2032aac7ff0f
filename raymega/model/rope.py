"""Rotary position embedding (RoPE), in the rotate-half convention of Llama.

Feature i of a head is paired with feature i + K/2; pair i at position s turns by the angle
s / base^(2i/K). It owns the table of angles, one for all layers of a stage.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raymega.config.schema import ModelSection


class Rope(nn.Module):
    """Turns the feature pairs of each head by its position; no parameters."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelSection, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        pairs = torch.arange(0, model.head_width, 2, dtype=torch.float64, device=device)
        positions = torch.arange(model.max_positions, dtype=torch.float64, device=device)
        angles = positions[:, None] * model.rope_base ** (-pairs / model.head_width)
        wide = torch.promote_types(dtype, torch.float32)
        self.register_buffer("cos", angles.cos().to(wide)[:, None, None], persistent=False)
        self.register_buffer("sin", angles.sin().to(wide)[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [S, B, heads, K] -> the same; computed in max(fp32, dtype)."""
        cos, sin = self.cos[: x.shape[0]], self.sin[: x.shape[0]]
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
