"""Planted mistakes in encoder-decoder models and their spans: layouts that differ, and tests that transformers or the text decide."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import Mutation
from tests.mutations.proofs import ProofMutation

T5 = (
    "model.family=t5_v1_1", "model.num_kv_heads=num_heads", "model.tie_word_embeddings=false", "data.seq_len=64",
    "model.encoder_decoder={num_encoder_layers: 1, decoder_seq_len: 16}",
    "data.span_corruption={text_seq_len: 50, first_sentinel_id: 255, eos_token_id: 64, decoder_start_token_id: 65}",
)  # fmt: skip
STAGE = "model/encoder_decoder.py"
ATTENTION = "model/attention/relative_attention.py"
SPANS = "data/row_rules/span_corruption.py"
SPAN_TESTS = "tests/unit/data/row_rules/test_span_corruption.py"
WITNESS = "tests/dist/model/test_encoder_decoder.py"
OPTIONS = "tests/dist/model/test_two_stream_options.py"
MASKED = f"{OPTIONS}::test_a_step_is_that_of_transformers_with_the_same_masks"
LOGITS = f"{WITNESS}::test_logits_are_those_of_transformers"
STEPS = f"{WITNESS}::test_steps_are_those_of_a_plain_loop"
GATHERED = Layout(cp=2, cp_method="all_gather")

TWO_STREAMS: tuple[Mutation, ...] = (
    Mutation(
        name="spans are drawn by process",
        file=SPANS,
        old='f"{self.name}/{sample}/{document}".encode()',
        new="f\"{self.name}/{sample}/{document}/{__import__('os').getpid()}\".encode()",
        layout=Layout(dp=2),
        job=T5,
    ),
    Mutation(
        name="a rank's heads have the biases of other heads",
        file="model/stream_block.py",
        old="torch.stack((self.encoder_positions, self.decoder_positions))",
        new="torch.stack((self.encoder_positions, self.decoder_positions)).roll(self.sp.tp.index, -1)",
        layout=Layout(tp=2),
        job=T5,
    ),
    Mutation(
        name="gathered keys have the positions of this rank's tokens",
        file="parallel/context_parallel/stream_places.py",
        old="own, every = begin + held[cp_rank], begin + torch.cat(held)",
        new="own, every = begin + held[cp_rank], begin + torch.cat([held[cp_rank]] * cp)",
        layout=GATHERED,
        job=T5,
    ),
    Mutation(
        name="the tables of positions get no gradient of later stages",
        file=STAGE,
        old="rows.flatten()[:numbers].view(shape)",
        new="rows.flatten()[:numbers].view(shape).detach()",
        layout=Layout(pp=2),
        job=T5,
    ),
    Mutation(
        name="the encoder's output gets no gradient of later stages",
        file=STAGE,
        old="return encoder, decoder, rows.flatten()",
        new="return encoder.detach(), decoder, rows.flatten()",
        layout=Layout(pp=2),
        job=T5,
    ),
    Mutation(
        name="the decoder reads keys of its own rank alone",
        file=ATTENTION,
        old="k, v = gather_positions(torch.stack((k, v), 1), context).unbind(1)",
        new="k, v = torch.cat([torch.stack((k, v), 1)] * context.size).unbind(1)",
        layout=GATHERED,
        job=T5,
    ),
    Mutation(
        name="sequence-parallel ranks drop the same places of a stream",
        file=STAGE,
        old="own=self.tp_stream.own(keys.everywhere[part]),",
        new="own=keys.everywhere[part].chunk(self.tp_stream.degree)[0],",
        layout=Layout(tp=2, sequence_parallel=True),
        job=(*T5, "model.hidden_dropout=0.2"),
    ),
)
TWO_STREAM_PROOFS: tuple[ProofMutation, ...] = (
    ProofMutation(
        name="attention to the encoder drops what the decoder's own attention drops",
        file=ATTENTION,
        old="WeightDropout(factory, name, model)",
        new='WeightDropout(factory, name.replace("cross_", ""), model)',
        tests=(MASKED,),
    ),
    ProofMutation(
        name="the encoder's output is not dropped",
        file="model/stream_block.py",
        old="x = self.end_dropout(self._normal(self.end_norm, x), keys)",
        new="x = self._normal(self.end_norm, x)",
        tests=(MASKED,),
    ),
    ProofMutation(
        name="a decoder sees its future",
        file=ATTENTION,
        old="hidden = hidden | (distance > 0)",
        new="hidden = hidden | (distance > 1)",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="the bias of one direction is that of the other",
        file=ATTENTION,
        old="distance = places.key_positions[:, None, :] - places.positions[:, :, None]",
        new="distance = places.positions[:, :, None] - places.key_positions[:, None, :]",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="attention to the encoder reads padding",
        file=STAGE,
        old="document_mask(decoder.documents, encoder.key_documents, tables.dtype)",
        new="document_mask(decoder.documents, encoder.key_documents.clamp(0, 0), tables.dtype)",
        tests=(STEPS,),
    ),
    ProofMutation(
        name="a tied head does not divide",
        file="model/families.py",
        old="head.logit_scale *= model.hidden_size**-0.5",
        new="head.logit_scale *= 1.0",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="the encoder's output is not normalised",
        file="model/stream_block.py",
        old="x = self.end_dropout(self._normal(self.end_norm, x), keys)",
        new="x = self.end_dropout(x, keys)",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="scores are divided by the root of their width",
        file=ATTENTION,
        old="(q @ k.mT + bias)",
        new="(q * k.shape[-1] ** -0.5 @ k.mT + bias)",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="a span crosses into the next document",
        file=SPANS,
        old="for number, text in enumerate(texts):",
        new="for number, text in enumerate([np.concatenate(texts)]):",
        tests=(f"{SPAN_TESTS}::test_documents_are_corrupted_apart_and_padding_is_of_none",),
    ),
    ProofMutation(
        name="spans are alike in all samples",
        file=SPANS,
        old='f"{self.name}/{sample}/{document}"',
        new='f"{self.name}/{document}"',
        tests=(f"{SPAN_TESTS}::test_spans_depend_on_seed_sample_and_document_alone",),
    ),
    ProofMutation(
        name="short spans are drawn more often than long ones",
        file=SPANS,
        old="lengths = _partition(noise, count, random)",
        new="lengths = np.sort(_partition(noise, count, random))",
        tests=(f"{SPAN_TESTS}::test_spans_have_the_published_distribution",),
    ),
    ProofMutation(
        name="the decoder reads the token that it predicts",
        file=SPANS,
        old="np.concatenate(([self.section.decoder_start_token_id], target[:-1]))",
        new="target.copy()",
        tests=(f"{SPAN_TESTS}::test_source_and_target_are_the_text",),
    ),
)  # fmt: skip
