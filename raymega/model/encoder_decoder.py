"""Pipeline stage and blocks of encoder-decoder families (T5): two streams through one pipeline.

A row is the encoder's tokens and then the decoder's. Encoder blocks change the first stream, and decoder blocks
the second one, with the first as an input. Between stages both travel as one activation, with the tables of
relative positions behind them: so each schedule runs as it does for other families.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from raymega.config.schema import ModelSection
from raymega.model.attention.relative_attention import document_mask, position_bias
from raymega.model.heads.score_head import language_head
from raymega.model.layers.activation_offload import tensors_in
from raymega.model.layers.transformer_block import ResidualDropout
from raymega.model.pipeline_stage import StageModule
from raymega.model.stream_block import StreamBlock, StreamEmbedding, Streams
from raymega.parallel.context_parallel.context import (
    Context,
    MicroBatch,
    Rows,
    TokenLayout,
    whole_rows,
)
from raymega.parallel.context_parallel.stream_places import Places, stream_places
from raymega.parallel.core.dropout import TokenKeys
from raymega.plan.layers.encoder_decoder import table_rows


class EncoderDecoderStage(StageModule):
    """Stage that holds some blocks of encoder and decoder; see :class:`StageModule`."""

    def __init__(self, model: ModelSection, stage: Any, **parts: Any) -> None:
        super().__init__(model, stage, **parts)
        section = model.encoder_decoder
        self.num_buckets = section.relative_attention_num_buckets
        self.max_distance = section.relative_attention_max_distance
        self.decoder_seq_len = section.decoder_seq_len
        blocks = [cast(StreamBlock, block) for block in self.layers.values()]
        self.has_encoder = any(block.cross_attention is None for block in blocks)
        self.has_decoder = any(block.cross_attention is not None for block in blocks)
        self.model = model
        self.end_dropout = ResidualDropout(self.seed, "decoder_end", model.hidden_dropout)

    def carried_length(self, micro_batch: MicroBatch) -> int:
        """Return the length of a micro-batch's activations between stages: both streams, and the tables' rows."""
        rows = self.carried_rows(len(micro_batch.tokens))
        return super().carried_length(micro_batch) + rows

    def carried_rows(self, micro_batch_size: int) -> int:
        """Return the rows of the tables of positions behind the tokens between stages."""
        tp = self.tp_stream.tp.size
        return table_rows(self.model, tp=tp, micro_batch_size=micro_batch_size)

    def forward(
        self, tokens: Tensor, labels: Tensor, mask: Tensor, hidden: Tensor | None, *more: Any,
        rows: Rows | None = None, **_unused: Any,
    ) -> Tensor:  # fmt: skip
        """Run the stage's forward on one micro-batch, as :meth:`StageModule.forward`; ``more`` are samples and rows."""
        rows = more[1] if len(more) > 1 else rows
        whole = rows or whole_rows(tokens.shape[1], tokens.device)
        layout = self._token_layout(whole, mask, more[0] if more else None)
        x = self._residual_stream(tokens, hidden, layout)
        if self.head is None:
            return x
        self.before_use(self.head)
        # labels are the decoder's, and the decoder's output is dropped as the encoder's is
        behind, head = slice(self._num_encoder(layout), None), language_head(self.head)
        x = self.end_dropout(head.norm(x), self._keys(layout)[1])
        return self._used(head, head.loss_sum_after_norm(x, labels[:, behind], mask[:, behind]))

    def document_logits(self, source: Tensor, target: Tensor) -> Tensor:
        """Return this rank's columns of the logits, [T, 1, V/tp], of one document on one stage and one cp rank.

        Args:
            source: Tokens that the encoder reads, [E] int64.
            target: Tokens that the decoder reads, [T] int64.
        """
        assert self.head is not None, "only the last stage makes logits"
        tokens = torch.cat((source, target))[None]
        rows = whole_rows(tokens.shape[1], tokens.device)
        places = _plain_places((len(source), len(target)), self.context, tokens.device)
        layout = self._token_layout(rows._replace(streams=places), torch.ones_like(tokens), None)
        x = self._residual_stream(tokens, None, layout)
        self.before_use(self.head)
        return self.head(x)

    def _token_layout(self, rows: Rows, mask: Tensor, samples: Tensor | None) -> TokenLayout:
        if rows.streams is None:
            length = rows.positions.shape[1] * self.context.degree
            lengths = (length - self.decoder_seq_len, self.decoder_seq_len)
            places = _plain_places(lengths, self.context, rows.positions.device)
            rows = rows._replace(streams=places)
        return super()._token_layout(rows, mask, samples)

    def _keys(self, layout: TokenLayout) -> tuple[TokenKeys | None, TokenKeys | None]:
        """Return the dropout keys of the encoder's tokens and of the decoder's; sequence parallelism cuts each stream."""
        keys = layout.keys
        if keys is None:
            return None, None
        count, every = self._num_encoder(layout), self.context.degree
        parts = (slice(0, count), slice(count, None))
        # of whole rows: the encoder's tokens on all context-parallel ranks come first
        whole = (slice(0, count * every), slice(count * every, None))
        encoder, decoder = (
            TokenKeys(
                own=self.tp_stream.own(keys.everywhere[part]),
                everywhere=keys.everywhere[part],
                rows=None if keys.rows is None else keys.rows[rows],
            )
            for part, rows in zip(parts, whole, strict=True)
        )
        return encoder, decoder

    def _num_encoder(self, layout: TokenLayout) -> int:
        assert layout.streams is not None, "the layout is of an encoder-decoder model"
        return layout.streams[0].documents.shape[1]

    def _residual_stream(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        token_layout: TokenLayout,
        token_types: Tensor | None = None,  # noqa: ARG002  # of the class above
    ) -> Tensor:
        """Return both streams and the tables for the next stage, or on the last one the decoder's stream."""
        assert token_layout.streams is not None, "the layout is of an encoder-decoder model"
        count, keys = self._num_encoder(token_layout), self._keys(token_layout)
        if self.embedding is not None:
            assert isinstance(self.embedding, StreamEmbedding), "the family has made it"
            self.before_use(self.embedding)
            parts = zip((tokens[:, :count], tokens[:, count:]), keys, strict=True)
            encoder, decoder = (
                self.embedding_dropout(self.embedding(part), key) for part, key in parts
            )
            tables = self.embedding.tables()
        else:
            assert hidden is not None, (
                "a stage that is not the first needs the hidden state before it"
            )
            encoder, decoder, tables = self._unpacked(hidden, count, tokens.shape[1])
        biases = self._biases(tables, token_layout.streams)
        shared = Streams(encoder, decoder, biases[0], biases[1], biases[2], keys[0], keys[1])
        streams = self._run_layers(shared, token_layout)  # type: ignore[arg-type]
        if self.head is not None:
            return cast(Streams, streams).decoder
        return self._packed(cast(Streams, streams), tables)

    def _biases(self, tables: Tensor, streams: tuple[Places, Places]) -> list[Tensor | None]:
        """Return the biases of encoder, decoder and attention to the encoder that this stage's blocks read."""
        (encoder, decoder), of = streams, {"max_distance": self.max_distance}
        biases: list[Tensor | None] = [None, None, None]
        if self.has_encoder:
            biases[0] = position_bias(tables[0], encoder, is_causal=False, **of)
        if self.has_decoder:
            biases[1] = position_bias(tables[1], decoder, is_causal=True, **of)
            biases[2] = document_mask(decoder.documents, encoder.key_documents, tables.dtype)
        return biases

    def _packed(self, streams: Streams, tables: Tensor) -> Tensor:
        """Return streams and tables as one activation [(S/cp)/sp + rows, B, D]."""
        _, size, width = streams.encoder.shape
        rows = self.carried_rows(size)
        flat = nn.functional.pad(tables.flatten(), (0, rows * size * width - tables.numel()))
        return torch.cat((streams.encoder, streams.decoder, flat.view(rows, size, width)))

    def _unpacked(self, hidden: Tensor, count: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        degree = self.tp_stream.degree
        sizes = (count // degree, (length - count) // degree)
        encoder, decoder, rows = hidden.split((*sizes, len(hidden) - sum(sizes)))
        shape = (2, self.num_buckets, self.model.num_heads // self.tp_stream.tp.size)
        numbers = shape[0] * shape[1] * shape[2]
        return encoder, decoder, rows.flatten()[:numbers].view(shape)

    def _staying(
        self, blocks: Sequence[nn.Module], x: Any, token_layout: TokenLayout
    ) -> Iterator[Tensor]:
        """Yield also what no block of ``blocks`` changes: biases, masks, and the stream of the other side."""
        yield from super()._staying(blocks, x, token_layout)
        streams = cast(Streams, x)
        yield from tensors_in(streams[2:])
        are_decoders = {cast(StreamBlock, block).cross_attention is not None for block in blocks}
        if are_decoders == {True}:
            yield streams.encoder
        elif are_decoders == {False}:
            yield streams.decoder

    def _used(self, unit: nn.Module, output: Any) -> Any:
        """Make ``before_use`` wait for a unit's weights before its backward, under ZeRO-3."""
        if not isinstance(output, Streams):
            return super()._used(unit, output)
        super()._used(unit, cast(StreamBlock, unit).changed(output))
        return output


def _plain_places(
    lengths: tuple[int, int], context: Context, device: torch.device
) -> tuple[Places, Places]:
    """Return the places of rows that are one document without padding."""
    numbers = torch.cat([torch.arange(length) for length in lengths])[None]
    cp, cp_rank = context.degree, context.index
    encoder, decoder = stream_places(
        torch.zeros_like(numbers), numbers, lengths, cp=cp, cp_rank=cp_rank
    )
    return Places(*(t.to(device) for t in encoder)), Places(*(t.to(device) for t in decoder))
