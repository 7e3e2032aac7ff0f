"""Multi-token prediction (DeepSeek-V3, 2024): extra blocks that predict tokens further ahead.

The model itself is depth 0. Depth k joins the hidden state of depth k - 1 at token i with the embedding of
token i + k, and predicts token i + k + 1. Embedding and head are shared with the model; the loader supplies
the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from raymega.config.schema import ModelSection
from raymega.model.families import TOKEN_TABLE, make_block, make_head, make_norm, make_score_head
from raymega.model.heads.score_head import ScoreHead
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
"""Labels (int64) and mask (1 where the label counts, else 0) of each depth, [depth, B, S/cp] each."""


def make_last(
    factory: ParameterFactory,
    model: ModelSection,
    *,
    table: ShardedParameter | None,
    positions: nn.Module,
    experts: ExpertGroups,
) -> Head | ScoreHead:
    """Return the head, with multi-token prediction; both share the token table where they need it.

    ``table`` is the embedding's weight if it is on this rank; else a new tied copy is made.
    """
    if model.head.is_on:
        return make_score_head(factory, model)
    if model.needs_token_table_last and table is None:
        table = factory.make(TOKEN_TABLE)
    head = make_head(factory, model, table)
    if model.num_nextn_predict_layers:
        assert table is not None, "it reads the table"
        head.further = MultiTokenPrediction(factory, model, positions, experts, table)
    return head


class MtpLayer(nn.Module):
    """Layers of one depth: final_norm(block(join [norm(token), norm(hidden)]))."""

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
        # Named by its number, as the model's own blocks are, for names of hooks and tensors.
        block = make_block(factory, layer, model, positions, experts)
        self.blocks = nn.ModuleDict({str(layer): block})
        self.final_norm = make_norm(factory, f"{name}.final_norm", model)

    def forward(
        self, token: Tensor, hidden: Tensor, run: Callable[[nn.Module, Tensor], Tensor]
    ) -> Tensor:
        """Map token and hidden (after its last norm), [S/sp, B, D] each, to the next depth's hidden."""
        both = torch.cat((self.token_norm(token), self.hidden_norm(hidden)), dim=-1)
        (block,) = self.blocks.values()
        return self.final_norm(run(block, self.join(both)))


class MultiTokenPrediction(nn.Module):
    """All depths of multi-token prediction, and the sum of their losses.

    Args:
        factory: Factory of this stage's parameters.
        model: Model section of the job.
        positions: Rotation of queries and keys.
        experts: Groups of expert parallelism.
        table: Weight of the token embedding.
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
        """Return the unweighted sum of the token losses of all depths.

        Args:
            hidden: Hidden state of the model after its last norm, [S/sp, B, D].
            head: Head of the model.
            now: Labels and mask of the model itself, [B, S/cp] each.
            later: Labels and mask of each depth.
            run: Function that runs a block on the residual stream, with the stage's recomputation.
        """
        (labels, mask), total = now, torch.zeros((), device=hidden.device)
        for depth, next_labels, next_mask in zip(self.depths, *later, strict=True):
            # A masked label may be any number; the labels of further depths there are masked too.
            tokens = labels.masked_fill(mask == 0, 0)
            token = vocab_embedding(tokens.t(), self.table, self.sp)
            hidden = depth(token, hidden, run)
            labels, mask = next_labels, next_mask
            total = total + head.loss_sum_after_norm(hidden, labels, mask)
        return total
