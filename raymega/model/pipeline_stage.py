"""Pipeline stage of the model: some blocks, the embedding on the first stage, the head on the last.

Transfers between stages are in `pipeline/p2p.py`, the order of passes in `schedule/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from raymega.config.schema import MemorySection, ModelSection, PrecisionSection
from raymega.model.attention.rope import Rope
from raymega.model.families import TOKEN_TABLE, make_block, make_embedding, make_positions
from raymega.model.heads.score_head import ScoreHead, language_head
from raymega.model.layers.activation_offload import ActivationOffloader, tensors_in
from raymega.model.layers.embedding import EmbeddingNoise
from raymega.model.layers.lm_head import Head
from raymega.model.layers.recompute import recomputed
from raymega.model.layers.transformer_block import ResidualDropout, TransformerBlock
from raymega.model.mtp import FutureLabels, MultiTokenPrediction, make_last
from raymega.model.objectives import Objective
from raymega.model.token_keys import token_keys
from raymega.parallel.context_parallel.context import (
    Context,
    EncoderInput,
    LossInput,
    MicroBatch,
    Rows,
    TokenLayout,
    make_token_ids,
    make_token_layout,
    no_context,
    row_positions,
    whole_rows,
)
from raymega.parallel.core.host_copies import HostMemory
from raymega.parallel.core.linear_map import with_gradient
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.core.weight_grads import WeightGradQueue
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups, no_expert_groups
from raymega.parallel.tensor_parallel.adapters import adapter_settings
from raymega.parallel.tensor_parallel.fp8_linear import Fp8
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.parallel.tensor_parallel.token_scores import TokenScores
from raymega.plan.fp8_layers import fp8_blocks
from raymega.plan.layers.layer_pattern import state_kind
from raymega.plan.stages import Stage
from raymega.plan.tensor_table import stage_tensors


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
            adapters=adapter_settings(model.lora, seed),
        )
        self.adapters = factory.adapters
        # which kinds of randomness and routing need keys or ids of tokens
        self.seed, self.tp_stream = seed, sp
        self.has_random, self.has_experts = model.has_random, model.moe.num_experts > 0
        self.drops_weights, self.has_states = model.attention_dropout > 0, bool(state_kind(model))
        # embedding, blocks, head
        self.rope = make_positions(model, dtype=dtype, device=device, is_fused=is_fused)
        precision = precision or PrecisionSection()
        self.fp8 = Fp8(by_row=precision.fp8 == "rowwise", micro=experts.micro, is_fused=is_fused)
        in_fp8 = fp8_blocks(model.num_layers, precision)
        of_fp8 = replace(factory, fp8=self.fp8)
        blocks = {
            str(i): make_block(of_fp8 if i in in_fp8 else factory, i, model, self.rope, experts)
            for i in stage.layers
        }
        self.embedding = make_embedding(factory, model) if stage.is_first else None
        self.noise = EmbeddingNoise(seed, model.neftune_noise_alpha)
        self.embedding_dropout = ResidualDropout(seed, "embedding", model.hidden_dropout)
        self.layers = nn.ModuleDict(blocks)
        self.head: Head | ScoreHead | None = None
        if stage.is_last:
            if model.needs_token_table_last and self.embedding is not None:
                token_table = self.embedding.tokens.weight
            self.head = make_last(
                factory, model, table=token_table, positions=self.rope, experts=experts
            )
        # set by others: the step, build, the weight buffer, memory.offload
        self.objective: Objective | None = None
        self.mtp_loss_sum: Tensor | float = 0.0
        self.before_use: Callable[[nn.Module], None] = lambda _part: None
        self.offloader: ActivationOffloader | None = None

    @property
    def mtp(self) -> MultiTokenPrediction | None:
        """Multi-token prediction; a part of the head, so that ZeRO-3 gathers its weights with it."""
        further = None if self.head is None else self.head.further
        assert further is None or isinstance(further, MultiTokenPrediction), "the head has no other"
        return further

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
        encoder: EncoderInput | None = None,
        beside: LossInput | None = None,
    ) -> Tensor:
        """Run the stage's forward on one micro-batch.

        Args:
            tokens: Input tokens, [B, S/cp] int64; read by the first stage.
            labels: Next tokens, or an encoder's masked tokens, [B, S/cp] int64, any number where ``mask``
                is 0; read by the last stage.
            mask: Loss mask, [B, S/cp], 1 where a token's loss counts, else 0; read by the last stage
                and by routers.
            hidden: Activation of the previous stage, [S/(cp*sp), B, D]; None on the first.
            samples: Global sample indices, [B] int64 or [B, S/cp] for one a token, which seed dropout
                and jitter; None turns both off.
            rows: Documents in each row; None is one document a row, whole on this rank.
            later: Labels and mask of multi-token prediction; None predicts the next token only.
            encoder: Token types and pairs of encoders; None is type 0 everywhere and no pairs.
            beside: Input of :attr:`objective` beside labels: pairs, scored documents, a teacher; None for the loss of tokens.

        Returns:
            [S/(cp*sp), B, D] for the next stage, or the last stage's sum of masked token losses, a
            scalar in max(fp32, dtype) that is equal on all tensor-parallel ranks.
        """
        # blocks
        token_layout = self._token_layout(
            rows or whole_rows(tokens.shape[1], tokens.device), mask, samples
        )
        types = None if encoder is None else encoder.token_types
        x = self._residual_stream(tokens, hidden, token_layout, types)
        if self.head is None:
            return x
        # head: the loss of the next token
        self.before_use(self.head)
        if beside is not None or isinstance(self.head, ScoreHead):
            assert self.objective is not None, (
                "a job of another loss than that of tokens has set it"
            )
            given = self.head, x, (labels, mask), beside, token_layout.context
            return self._used(self.head, self.objective.stage_loss(*given))
        if self.head.segment_pairs is not None and encoder is not None:
            x = self.head.norm(x)
            loss = self.head.loss_sum_after_norm(x, labels, mask)
            return self._used(self.head, self.head.segment_pairs.add_gradient(loss, x, encoder))
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
        b = micro_batch
        parts = b.tokens, b.labels, b.mask
        return self(*parts, hidden, b.samples, b.rows, b.later, b.encoder, b.pairs or b.teacher)

    def evaluate(self, micro_batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        """Call :meth:`forward` for evaluation: without dropout, with plain cross entropy."""
        self.eval()
        try:
            parts = micro_batch.tokens, micro_batch.labels, micro_batch.mask
            b = micro_batch
            return self(*parts, hidden, rows=b.rows, encoder=b.encoder, beside=b.pairs)
        finally:
            self.train()

    def score(self, micro_batch: MicroBatch, hidden: Tensor | None) -> Tensor | TokenScores:
        """Return the activation for the next stage, or the last stage's scores [S/cp, B] of the labels that count."""
        x = self.evaluated(micro_batch, hidden)
        return x if self.head is None else language_head(self.head).scores(x, micro_batch)

    def top_tokens(
        self, micro_batch: MicroBatch, hidden: Tensor | None, k: int
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the activation for the next stage, or the last stage's k likeliest next tokens.

        They are those of the n positions where a label is above 0: logits and ids, [n, k] each.
        """
        x = self.evaluated(micro_batch, hidden)
        is_asked = micro_batch.labels > 0
        return x if self.head is None else language_head(self.head).top_tokens(x, is_asked, k)

    def evaluated(self, micro_batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        """Return the residual stream behind this stage's blocks, without dropout."""
        self.eval()
        try:
            token_layout = self._token_layout(micro_batch.rows, micro_batch.mask, None)
            types = None if micro_batch.encoder is None else micro_batch.encoder.token_types
            x = self._residual_stream(micro_batch.tokens, hidden, token_layout, types)
        finally:
            self.train()
        if self.head is not None:
            self.before_use(self.head)
        return x

    def logits(
        self, tokens: Tensor, hidden: Tensor | None, token_types: Tensor | None = None
    ) -> Tensor:
        """Return this rank's columns of the logits, [S, B, V/tp], unpadded; last stage only."""
        assert self.head is not None, "only the last stage makes logits"
        rows, mask = whole_rows(tokens.shape[1], tokens.device), torch.ones_like(tokens)
        layout = self._token_layout(rows, mask, None)
        x = self._residual_stream(tokens, hidden, layout, token_types)
        self.before_use(self.head)
        return self.head(x)

    def _residual_stream(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        token_layout: TokenLayout,
        token_types: Tensor | None = None,
    ) -> Tensor:
        x = hidden
        if self.embedding is not None:
            self.before_use(self.embedding)
            x = self.embedding(tokens, token_layout.positions, token_types)
            x = self.embedding_dropout(self.noise(x, token_layout), token_layout.keys)
        assert x is not None, "a stage that is not the first needs the hidden state before it"
        return self._run_layers(x, token_layout)

    def carried_length(self, micro_batch: MicroBatch) -> int:
        """Return the length S/(cp*sp) of a micro-batch's activations between stages."""
        return micro_batch.tokens.shape[1] // self.tp_stream.degree

    def take_mtp_loss_sum(self) -> Tensor | float:
        """Return and reset the unweighted sum of multi-token prediction losses."""
        taken, self.mtp_loss_sum = self.mtp_loss_sum, 0.0
        return taken

    def _token_layout(self, rows: Rows, mask: Tensor, samples: Tensor | None) -> TokenLayout:
        """Return what all layers share of a micro-batch: positions, rotations, random keys, token ids."""
        context = rows.context or self.context
        token_layout = make_token_layout(rows, context, has_whole_rows=self.has_states)
        keys = rotations = local_rotations = token_ids = None
        if isinstance(self.rope, Rope):
            rotations, local_rotations = self.rope.all_rotations(token_layout.positions)
        if samples is not None and self.has_random:
            length = sum(rows.documents[0]) if self.drops_weights else 0
            at = row_positions(rows, context)
            keys = token_keys(self.seed, samples, at, self.tp_stream, row_length=length)
        if self.has_experts:
            token_ids = make_token_ids(rows, mask, context, self.tp_stream)
        token_layout = replace(token_layout, rotations=rotations, local_rotations=local_rotations)
        return replace(token_layout, keys=keys, token_ids=token_ids)

    def _run_layers(self, x: Tensor, token_layout: TokenLayout) -> Tensor:
        blocks = list(self.layers.values())
        if not blocks:  # the head's parts have adapters too
            self.adapters.keys = token_layout.keys
        if not torch.is_grad_enabled() or not (self.blocks_together or self.offloader):
            return self._run_blocks(blocks, x, token_layout)
        for start in range(0, len(blocks), self.blocks_together or 1):
            some = blocks[start : start + (self.blocks_together or 1)]
            run = partial(self._run_blocks, some, token_layout=token_layout)
            run = partial(recomputed, run, x) if self.blocks_together else partial(run, x)
            if self.offloader is None:
                x = run()
            else:  # what remains saved moves to the host
                x = self.offloader.run(run, self._staying(some, x, token_layout))
        if self.offloader is not None:
            self.offloader.end()
        return x

    def _staying(
        self, blocks: Sequence[nn.Module], x: Tensor, token_layout: TokenLayout
    ) -> Iterator[Tensor]:
        """Yield tensors that backward of ``blocks`` reads and that stay on the device anyway; ``x`` is their input."""
        del x  # of encoder-decoder models
        for block in blocks:
            yield from block.parameters()
        yield from tensors_in(token_layout)

    def _run_blocks(self, blocks: list[nn.Module], x: Tensor, token_layout: TokenLayout) -> Tensor:
        # Recomputation runs this again, maybe after the forward of other micro-batches.
        self.adapters.keys = token_layout.keys
        for block in blocks:
            self.before_use(block)
            x = block(x, token_layout)
            # Recomputation ends with the last block, so its weights are gathered when its backward begins.
            if not self.blocks_together or block is not blocks[-1]:
                x = self._used(block, x)
        return x

    def _run_further(self, block: nn.Module, x: Tensor, *, token_layout: TokenLayout) -> Tensor:
        """Run a block of multi-token prediction; its weights were gathered with the head's."""

        def run(x: Tensor) -> Tensor:  # recomputation may follow other micro-batches' forward
            self.adapters.keys = token_layout.keys
            return block(x, token_layout)

        if not self.blocks_together or not torch.is_grad_enabled():
            return run(x)
        return recomputed(run, x)

    def _used(self, unit: nn.Module, output: Tensor) -> Tensor:
        """Make ``before_use`` wait for a unit's weights before its backward, under ZeRO-3."""
        if self.are_weights_passing and output.requires_grad:
            output.register_hook(lambda _gradient: self.before_use(unit))
        return output
