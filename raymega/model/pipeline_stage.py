"""Pipeline stage of the model: some blocks, the embedding on the first stage, the head on the last.

Transfers between stages are in `pipeline/p2p.py`, the order of passes in `schedule/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raymega.config.schema import MemorySection, ModelSection, PrecisionSection
from raymega.model.attention.rope import Rope
from raymega.model.families import make_block, make_norm, make_positions
from raymega.model.layers.activation_offload import ActivationOffloader, tensors_in
from raymega.model.layers.embedding import Embedding
from raymega.model.layers.lm_head import Head
from raymega.model.layers.transformer_block import ResidualDropout, TransformerBlock
from raymega.model.mtp import FutureLabels, MultiTokenPrediction
from raymega.parallel.context_parallel.context import (
    Context,
    MicroBatch,
    Rows,
    TokenLayout,
    make_token_ids,
    make_token_layout,
    no_context,
    row_positions,
    whole_rows,
)
from raymega.parallel.core.dropout import TokenKeys, row_keys
from raymega.parallel.core.host_copies import HostMemory
from raymega.parallel.core.linear_map import with_gradient
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.core.weight_grads import WeightGradQueue
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups, no_expert_groups
from raymega.parallel.tensor_parallel.fp8_linear import Fp8
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.parallel.tensor_parallel.token_scores import TokenScores
from raymega.plan.fp8_layers import fp8_blocks
from raymega.plan.stages import Stage
from raymega.plan.tensor_table import stage_tensors

TOKEN_TABLE = "embedding.tokens.weight"


class StageModule(nn.Module):
    """Module of stage ``stage`` on one rank, with initial values.

    Every parameter is a ShardedParameter; together they are ``stage_tensors`` of `plan/tensor_table.py`.
    ``before_use`` is called with each unit (embedding, block, head) before forward uses its weights, so
    that the weight buffer can wait for their all-gather. Under ZeRO-3 (``are_weights_passing``) it is
    also called before the backward of each block and the head. ``grad_queue`` collects the weight
    gradients of linear layers where a zero-bubble schedule defers them.

    Args:
        context: Context-parallel group of the sequence; None without context parallelism.
        experts: Groups of expert parallelism; None without it.
        token_table: Weight of the embedding on this rank's first stage, for a tied head; else None.
        is_fused: Whether to compile the operations between matrix products.
        precision: Precision section, which selects the blocks that multiply in fp8; None selects none.
        is_meta: Whether parameters are made without memory, on the meta device.
    """

    blocks_together = 0
    """Number of consecutive blocks that one recomputation repeats in backward; 0 recomputes nothing."""
    are_weights_passing = False

    def __init__(  # noqa: PLR0913  # build is the one place that calls it
        self,
        model: ModelSection,
        stage: Stage,
        *,
        sp: SequenceParallel,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        context: Context | None = None,
        experts: ExpertGroups | None = None,
        token_table: ShardedParameter | None = None,
        is_fused: bool = False,
        precision: PrecisionSection | None = None,
        is_meta: bool = False,
    ) -> None:
        super().__init__()
        self.context = context or no_context()
        # groups, and the factory that makes this stage's parameters
        experts = experts or no_expert_groups(sp)
        is_copied = model.needs_token_table_last and not stage.are_ends_together
        self.grad_queue = WeightGradQueue()
        factory = ParameterFactory(
            table={tensor.name: tensor for tensor in stage_tensors(model, stage)},
            sp=sp,
            dtype=dtype,
            device=device,
            seed=seed,
            tied=TOKEN_TABLE if is_copied else "",
            is_tied_copy=stage.is_last,
            experts=experts.place,
            grad_queue=self.grad_queue,
            is_fused=is_fused,
            is_meta=is_meta,
        )
        # which kinds of randomness and routing need keys or ids of tokens
        self.seed, self.tp_stream = seed, sp
        drawn = model.hidden_dropout, model.attention_dropout, model.moe.router_jitter_noise
        self.has_random, self.has_experts = max(drawn) > 0, model.moe.num_experts > 0
        self.drops_weights = model.attention_dropout > 0
        # embedding, blocks, head
        self.rope = make_positions(model, dtype=dtype, device=device, is_fused=is_fused)
        precision = precision or PrecisionSection()
        self.fp8 = Fp8(by_row=precision.fp8 == "rowwise", micro=experts.micro, is_fused=is_fused)
        in_fp8 = fp8_blocks(model.num_layers, precision)
        blocks = {
            str(i): make_block(
                replace(factory, fp8=self.fp8 if i in in_fp8 else None),
                i,
                model,
                self.rope,
                experts,
            )
            for i in stage.layers
        }
        self.embedding = Embedding(factory) if stage.is_first else None
        self.embedding_dropout = ResidualDropout(seed, "embedding", model.hidden_dropout)
        self.layers = nn.ModuleDict(blocks)
        self.head: Head | None = None
        if stage.is_last:
            self._make_last(factory, model, experts, token_table)
        # set by others: the step, the weight buffer, memory.offload
        self.mtp_loss_sum: Tensor | float = 0.0
        self.before_use: Callable[[nn.Module], None] = lambda _part: None
        self.offloader: ActivationOffloader | None = None

    def _make_last(
        self,
        factory: ParameterFactory,
        model: ModelSection,
        experts: ExpertGroups,
        table: ShardedParameter | None,
    ) -> None:
        """Build the head and multi-token prediction; both share the token table where they need it."""
        if model.needs_token_table_last:
            table = self._token_table(factory, table)
        norm = make_norm(factory, "final_norm", model)
        own = None if model.tie_word_embeddings else factory.make("head.weight")
        weight = own if own is not None else table
        assert weight is not None, "a tied head has a table"
        self.head = Head(norm, weight, model, factory)
        if model.num_nextn_predict_layers:
            assert table is not None, "it reads the table"
            self.head.further = MultiTokenPrediction(factory, model, self.rope, experts, table)

    @property
    def mtp(self) -> MultiTokenPrediction | None:
        """Multi-token prediction; a part of the head, so that ZeRO-3 gathers its weights with it."""
        further = None if self.head is None else self.head.further
        assert further is None or isinstance(further, MultiTokenPrediction), "the head has no other"
        return further

    def _token_table(
        self, factory: ParameterFactory, table: ShardedParameter | None
    ) -> ShardedParameter:
        """Return the embedding's weight if it is on this rank, else a new tied copy."""
        if self.embedding is not None:
            return self.embedding.tokens.weight
        return table if table is not None else factory.make(TOKEN_TABLE)

    def recompute(self, memory: MemorySection, host: HostMemory | None = None) -> None:
        """Choose what backward recomputes; offload activations to ``host`` if it is given."""
        self.offloader = ActivationOffloader(host) if host is not None else None
        self.blocks_together = memory.recompute_every if memory.recompute == "full" else 0
        for block in self._blocks():
            block.remake(memory.recompute_parts if memory.recompute == "selective" else ())

    def _blocks(self) -> list[TransformerBlock]:
        """Return the blocks of this stage, those of multi-token prediction included."""
        return [module for module in self.modules() if isinstance(module, TransformerBlock)]

    def forward(  # noqa: PLR0913  # one micro-batch, part by part
        self,
        tokens: Tensor,
        labels: Tensor,
        mask: Tensor,
        hidden: Tensor | None,
        samples: Tensor | None = None,
        rows: Rows | None = None,
        later: FutureLabels | None = None,
    ) -> Tensor:
        """Run the stage's forward on one micro-batch.

        Args:
            tokens: Input tokens, [B, S/cp] int64; read by the first stage.
            labels: Next tokens, [B, S/cp] int64, any number where ``mask`` is 0; read by the last stage.
            mask: Loss mask, [B, S/cp], 1 where a token's loss counts, else 0; read by the last stage
                and by routers.
            hidden: Activation of the previous stage, [S/(cp*sp), B, D]; None on the first.
            samples: Global sample indices, [B] int64 or [B, S/cp] for one a token, which seed dropout
                and jitter; None turns both off.
            rows: Documents in each row; None is one document a row, whole on this rank.
            later: Labels and mask of multi-token prediction; None predicts the next token only.

        Returns:
            [S/(cp*sp), B, D] for the next stage, or the last stage's sum of masked token losses, a
            scalar in max(fp32, dtype) that is equal on all tensor-parallel ranks.
        """
        # blocks
        token_layout = self._token_layout(
            rows or whole_rows(tokens.shape[1], tokens.device), mask, samples
        )
        x = self._residual_stream(tokens, hidden, token_layout)
        if self.head is None:
            return x
        # head: the loss of the next token
        self.before_use(self.head)
        if self.mtp is None or later is None:
            return self._used(self.head, self.head.loss_sum(x, labels, mask))
        x = self.head.norm(x)
        loss = self.head.loss_sum_after_norm(x, labels, mask)
        run = partial(self._run_further, token_layout=token_layout)
        # Multi-token prediction adds its gradient, not its value: the reported loss stays that of the next token.
        further = self.mtp.loss_sum(x, self.head, (labels, mask), later, run)
        self.mtp_loss_sum = self.mtp_loss_sum + further.detach()
        weight = self.mtp.weight
        loss = with_gradient(loss, further, lambda gradient: gradient * weight)
        return self._used(self.head, loss)

    def units(self) -> Iterator[nn.Module]:
        """Yield the units that ``before_use`` is called with, in the order of forward."""
        if self.embedding is not None:
            yield self.embedding
        yield from self.layers.values()
        if self.head is not None:
            yield self.head

    def uses(self, *, is_backward: bool) -> Iterator[nn.Module]:
        """Yield the units in the order in which a forward or backward calls ``before_use``."""
        if not is_backward:
            yield from self.units()
            return
        if self.head is not None:
            yield self.head
        blocks = list(self.layers.values())
        together = self.blocks_together or len(blocks) or 1
        for start in reversed(range(0, len(blocks), together)):
            some = blocks[start : start + together]
            # recomputation: forward order, then backward in reverse
            yield from some if self.blocks_together else ()
            yield from reversed(some)

    def run(self, micro_batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        """Call :meth:`forward` for training."""
        rows = micro_batch.rows
        parts = micro_batch.tokens, micro_batch.labels, micro_batch.mask
        return self(*parts, hidden, micro_batch.samples, rows, micro_batch.later)

    def evaluate(self, micro_batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        """Call :meth:`forward` for evaluation: without dropout, with plain cross entropy."""
        rows = micro_batch.rows
        self.eval()
        try:
            parts = micro_batch.tokens, micro_batch.labels, micro_batch.mask
            return self(*parts, hidden, rows=rows)
        finally:
            self.train()

    def score(self, micro_batch: MicroBatch, hidden: Tensor | None) -> Tensor | TokenScores:
        """Return the activation for the next stage, or the last stage's scores of the labels, [S/cp, B]."""
        x = self._evaluated(micro_batch, hidden)
        return x if self.head is None else self.head.scores(x, micro_batch.labels)

    def top_tokens(
        self, micro_batch: MicroBatch, hidden: Tensor | None, k: int
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the activation for the next stage, or the last stage's k likeliest next tokens.

        They are those of the n positions where a label is above 0: logits and ids, [n, k] each.
        """
        x = self._evaluated(micro_batch, hidden)
        return x if self.head is None else self.head.top_tokens(x, micro_batch.labels > 0, k)

    def _evaluated(self, micro_batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        """Return the residual stream behind this stage's blocks, without dropout."""
        self.eval()
        try:
            token_layout = self._token_layout(micro_batch.rows, micro_batch.mask, None)
            x = self._residual_stream(micro_batch.tokens, hidden, token_layout)
        finally:
            self.train()
        if self.head is not None:
            self.before_use(self.head)
        return x

    def logits(self, tokens: Tensor, hidden: Tensor | None) -> Tensor:
        """Return this rank's columns of the logits, [S, B, V/tp], unpadded; last stage only."""
        assert self.head is not None, "only the last stage makes logits"
        rows = whole_rows(tokens.shape[1], tokens.device)
        x = self._residual_stream(
            tokens, hidden, self._token_layout(rows, torch.ones_like(tokens), None)
        )
        self.before_use(self.head)
        return self.head(x)

    def _residual_stream(
        self, tokens: Tensor, hidden: Tensor | None, token_layout: TokenLayout
    ) -> Tensor:
        x = hidden
        if self.embedding is not None:
            self.before_use(self.embedding)
            x = self.embedding_dropout(
                self.embedding(tokens, token_layout.positions), token_layout.keys
            )
        assert x is not None, "a stage that is not the first needs the hidden state before it"
        return self._run_layers(x, token_layout)

    def take_mtp_loss_sum(self) -> Tensor | float:
        """Return and reset the unweighted sum of multi-token prediction losses."""
        taken, self.mtp_loss_sum = self.mtp_loss_sum, 0.0
        return taken

    def _token_layout(self, rows: Rows, mask: Tensor, samples: Tensor | None) -> TokenLayout:
        """Return what all layers share of a micro-batch: positions, rotations, random keys, token ids."""
        context = rows.context or self.context
        token_layout = make_token_layout(rows, context)
        keys = rotations = token_ids = None
        if isinstance(self.rope, Rope):
            rotations = self.rope.rotations(token_layout.positions)
        if samples is not None and self.has_random:
            keys = self._keys(rows, samples)
        if self.has_experts:
            token_ids = make_token_ids(rows, mask, context, self.tp_stream)
        return replace(token_layout, keys=keys, rotations=rotations, token_ids=token_ids)

    def _keys(self, rows: Rows, samples: Tensor) -> TokenKeys:
        """Return the dropout keys of the tokens, a function of seed, sample and position."""
        at = row_positions(rows, rows.context or self.context)
        own = self.tp_stream.own(row_keys(self.seed, samples.t(), at.t()))
        if not self.drops_weights:
            return TokenKeys(own=own, rows=None)
        # Dropout on attention weights needs keys of whole rows: a query's weights span all ranks' keys.
        everywhere = whole_rows(sum(rows.documents[0]), samples.device).positions.t()
        return TokenKeys(own=own, rows=row_keys(self.seed, samples, everywhere))

    def _run_layers(self, x: Tensor, token_layout: TokenLayout) -> Tensor:
        blocks = list(self.layers.values())
        if not torch.is_grad_enabled() or not (self.blocks_together or self.offloader):
            return self._run_blocks(blocks, x, token_layout)
        for start in range(0, len(blocks), self.blocks_together or 1):
            some = blocks[start : start + (self.blocks_together or 1)]
            # recomputation: keep the input of the group only
            run = partial(self._run_blocks, some, x, token_layout)
            if self.blocks_together:
                run = partial(
                    checkpoint, self._run_blocks, some, x, token_layout, use_reentrant=False,
                    preserve_rng_state=False,
                )  # fmt: skip
            # offload: what remains saved moves to the host
            x = (
                run()
                if self.offloader is None
                else self.offloader.run(run, self._staying(some, token_layout))
            )
        if self.offloader is not None:
            self.offloader.end()
        return x

    def _staying(self, blocks: Sequence[nn.Module], token_layout: TokenLayout) -> Iterator[Tensor]:
        """Yield tensors that backward of ``blocks`` reads and that stay on the device anyway."""
        for block in blocks:
            yield from block.parameters()
        yield from tensors_in(token_layout)

    def _run_blocks(self, blocks: list[nn.Module], x: Tensor, token_layout: TokenLayout) -> Tensor:
        for block in blocks:
            self.before_use(block)
            x = block(x, token_layout)
            # Recomputation ends with the last block, so its weights are gathered when its backward begins.
            if not self.blocks_together or block is not blocks[-1]:
                x = self._used(block, x)
        return x

    def _run_further(self, block: nn.Module, x: Tensor, *, token_layout: TokenLayout) -> Tensor:
        """Run a block of multi-token prediction; its weights were gathered with the head's."""
        if not self.blocks_together or not torch.is_grad_enabled():
            return block(x, token_layout)
        return checkpoint(block, x, token_layout, use_reentrant=False, preserve_rng_state=False)

    def _used(self, unit: nn.Module, output: Tensor) -> Tensor:
        """Make ``before_use`` wait for a unit's weights before its backward, under ZeRO-3."""
        if self.are_weights_passing and output.requires_grad:
            output.register_hook(lambda _gradient: self.before_use(unit))
        return output
