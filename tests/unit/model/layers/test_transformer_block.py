"""The block: norms before the parts, residual around each."""

import torch
from torch import nn

from raymega.model.layers.transformer_block import TransformerBlock


class _Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x, token_layout=None):
        return self.factor * x


def test_block_adds_each_part_of_the_normed_stream():
    block = TransformerBlock(
        attention_norm=_Times(2),
        attention=_Times(3),
        attention_dropout=_Times(1),
        mlp_norm=_Times(5),
        mlp=_Times(7),
        mlp_dropout=_Times(1),
    )
    assert block(torch.tensor(1.0)) == (1 + 2 * 3) * (1 + 5 * 7)
