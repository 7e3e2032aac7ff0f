"""From the residual stream to logits and to the loss.

It sums the losses of tokens; what the sum is divided by is the step's business.
"""

from __future__ import annotations

from torch import Tensor, nn

from raymega.parallel.cross_entropy import vocab_parallel_cross_entropy
from raymega.parallel.deferral import Deferral
from raymega.parallel.parameter import ShardedParameter
from raymega.parallel.stream import Stream
from raymega.parallel.tensor import column_linear


class Head(nn.Module):
    """Final norm and the projection to the vocabulary, whose rows are cut over tp.

    The weight is handed in because it may be the token embedding's.
    """

    def __init__(
        self, norm: nn.Module, weight: ShardedParameter, stream: Stream, deferral: Deferral
    ) -> None:
        super().__init__()
        self.deferral = deferral
        self.norm = norm
        self.weight = weight
        self.stream = stream

    def forward(self, x: Tensor) -> Tensor:
        """x: [S/sp, B, D] -> logits [S, B, V/tp]."""
        return column_linear(self.norm(x), self.weight, None, self.stream, self.deferral)

    def loss_sum(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """Sum of the token losses where ``mask`` is 1.

        Args:
            x: [S/sp, B, D].
            labels: [B, S] int64; any number where ``mask`` is 0.
            mask: [B, S], 0 or 1.

        Returns:
            A scalar in max(fp32, dtype), equal on all tensor-parallel ranks.
        """
        losses = vocab_parallel_cross_entropy(self(x), labels.t(), self.stream.tp)
        return (losses * mask.t().to(losses.dtype)).sum()
