"""Multi-token prediction (DeepSeek-V3, 2024): blocks after the last one that look further ahead.

Depth k takes what depth k - 1 made of token i (the model itself is depth 0), joins to it the embedding
of token i + k, and predicts token i + k + 1 with the model's head. It owns these blocks and their
losses; labels further ahead are the loader's, embedding and head the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from raymega.config.schema import ModelSection
from raymega.model.families import make_block, make_norm
from raymega.model.layers.lm_head import Head
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups
from raymega.parallel.tensor_parallel.layers import (
    ParameterFactory,
    ReplicatedLinear,
)
from raymega.parallel.tensor_parallel.vocab_embedding import vocab_embedding
from raymega.plan.tensor_table import block_name

FutureLabels = tuple[Tensor, Tensor]
"""Labels and mask further ahead, [depth, B, S/cp] each: int64, and 1 where it counts, else 0."""


class MtpLayer(nn.Module):
    """The block of one depth: block(join [norm(token), norm(hidden)]), and a last norm."""

    def __init__(
        self,
        factory: ParameterFactory,
        depth: int,
        model: ModelSection,
        positions: nn.Module,
        experts: ExpertGroups,
    ) -> None:
        super().__init__()
        layer = model.num_layers + depth
        name = block_name(model, layer)
        self.token_norm = make_norm(factory, f"{name}.token_norm", model)
        self.hidden_norm = make_norm(factory, f"{name}.hidden_norm", model)
        self.join = ReplicatedLinear(factory, f"{name}.join")
        # By its number, as the model's own are.
        block = make_block(factory, layer, model, positions, experts)
        self.blocks = nn.ModuleDict({str(layer): block})
        self.final_norm = make_norm(factory, f"{name}.final_norm", model)

    def forward(
        self, token: Tensor, hidden: Tensor, run: Callable[[nn.Module, Tensor], Tensor]
    ) -> Tensor:
        """token, hidden: [S/sp, B, D], hidden after its last norm -> the same for the next depth."""
        both = torch.cat((self.token_norm(token), self.hidden_norm(hidden)), dim=-1)
        (block,) = self.blocks.values()
        return self.final_norm(run(block, self.join(both)))


class MultiTokenPrediction(nn.Module):
    """All depths, and the sum of their losses.

    Args:
        table: The token embedding's weight.
    """

    def __init__(
        self,
        factory: ParameterFactory,
        model: ModelSection,
        positions: nn.Module,
        experts: ExpertGroups,
        table: ShardedParameter,
    ) -> None:
        super().__init__()
        self.depths = nn.ModuleList(
            MtpLayer(factory, depth, model, positions, experts)
            for depth in range(model.num_nextn_predict_layers)
        )
        self.table, self.sp = table, factory.sp
        self.weight = model.mtp_loss_scaling_factor / model.num_nextn_predict_layers

    def loss_sum(
        self,
        hidden: Tensor,
        head: Head,
        now: Sequence[Tensor],
        later: FutureLabels,
        run: Callable[[nn.Module, Tensor], Tensor],
    ) -> Tensor:
        """Sum of all depths' token losses, none of them weighed.

        Args:
            hidden: [S/sp, B, D], the model's, after its last norm.
            head: The model's.
            now: The model's own labels and mask, [B, S/cp] each.
            later: Those of each depth.
            run: Runs a block on the stream, as the stage runs its own.
        """
        (labels, mask), total = now, torch.zeros((), device=hidden.device)
        for depth, next_labels, next_mask in zip(self.depths, *later, strict=True):
            # Where a label does not count it is any number, and then nothing after it counts.
            tokens = labels.masked_fill(mask == 0, 0)
            token = vocab_embedding(tokens.t(), self.table, self.sp)
            hidden = depth(token, hidden, run)
            labels, mask = next_labels, next_mask
            total = total + head.loss_sum_after_norm(hidden, labels, mask)
        return total
