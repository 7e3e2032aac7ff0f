"""Dropout of transformers' T5 by masks that are given: those of a seed, a sample and the places of its tokens in the row."""

import torch
from torch import nn

from raymega.parallel.core.dropout import LEVELS, keep_mask, place_key, row_keys


class GivenDropout:
    """Masks of the document that ``model`` reads next; see :meth:`read`."""

    def __init__(self, model, seed, *, hidden, weights):
        self.seed, self.hidden, self.weights = seed, hidden, weights
        self.keys, self.place, self.num_heads = {}, "", model.config.num_heads
        # blocks are numbered through both sides
        own = len(model.encoder.block)
        for side, stack in {"encoder": model.encoder, "decoder": model.decoder}.items():
            stack.dropout = _Ends(self, side)
            for number, block in enumerate(stack.block):
                at = f"layers.{number + (own if side == 'decoder' else 0)}"
                names = ["attention", "cross_attention", "mlp"]
                for part, name in zip(
                    block.layer, names if side == "decoder" else names[::2], strict=True
                ):
                    part.dropout = _Given(self, side, f"{at}.{name}")
                    if name == "mlp":  # nothing is dropped inside
                        part.DenseReluDense.dropout = nn.Identity()
                    if name != "mlp":
                        # hooks name the attention whose weights the patched function drops
                        inner = part.SelfAttention if name == "attention" else part.EncDecAttention
                        inner.register_forward_pre_hook(self._entering(side, f"{at}.{name}"))

    def _entering(self, side, place):
        def hook(*_):
            self.place = side, place

        return hook

    def read(self, sample, source, target):
        """Set the sample, and the places in its row [.] of the tokens that encoder and decoder read."""
        for side, at in {"encoder": source, "decoder": target}.items():
            self.keys[side] = row_keys(
                self.seed, torch.tensor([sample]), torch.as_tensor(at)[:, None]
            )[:, 0]

    def drop(self, x, side, place, rate):
        """Drop features of x [1, S, N] of a side."""
        if not rate:
            return x
        kept = keep_mask(self.keys[side] + place_key(self.seed, place), x.shape[-1], rate=rate)
        return x * kept * (LEVELS / (LEVELS - round(rate * LEVELS)))

    def drop_weights(self, weights, p, *, training):  # in place of torch's function
        """Drop some of the weights [1, H, Q, K] of the attention that was entered last."""
        del p, training
        # each head has a key of its own, so that masks do not depend on tensor parallelism
        side, place = self.place
        heads = [
            self.drop(weights[:, head], side, f"{place}.weights.{head}", self.weights)
            for head in range(self.num_heads)
        ]
        return torch.stack(heads, 1)


class _Given(nn.Module):
    def __init__(self, given, side, place):
        super().__init__()
        self.given, self.side, self.place = given, side, place

    def forward(self, x):
        return self.given.drop(x, self.side, self.place, self.given.hidden)


class _Ends(nn.Module):
    """Dropout of a stack's embedded tokens, and then of its output."""

    def __init__(self, given, side):
        super().__init__()
        self.given, self.side, self.is_output = given, side, False

    def forward(self, x):
        place = f"{self.side}_end" if self.is_output else "embedding"
        self.is_output = not self.is_output
        return self.given.drop(x, self.side, place, self.given.hidden)
