"""Planted mistakes in encoders and their masks: layouts that differ, and tests that transformers or the text decide."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import PACKED, Mutation
from tests.mutations.proofs import ProofMutation

BERT = (
    "model.family=bert", "model.num_kv_heads=num_heads", "model.encoder.sentence_loss=sentence_order",
    "data.masking={mask_token_id: 66, cls_token_id: 64, sep_token_id: 65}",
)  # fmt: skip
MASKING = "data/row_rules/masking.py"
HEAD = "model/layers/encoder_head.py"
MASK_TESTS = "tests/unit/data/row_rules/test_masking.py"
WITNESS = "tests/dist/model/test_encoders.py"
OUTPUTS = f"{WITNESS}::test_outputs_are_those_of_transformers"
STEPS = f"{WITNESS}::test_steps_are_those_of_a_plain_loop"
PAIRS = f"{MASK_TESTS}::test_pairs_are_of_both_classes_and_their_segments_have_types"

ENCODERS: tuple[Mutation, ...] = (
    Mutation(
        name="masks are drawn by process",
        file=MASKING,
        old='f"{self.name}/{sample}/{what}".encode()',
        new="f\"{self.name}/{sample}/{what}/{__import__('os').getpid()}\".encode()",
        layout=Layout(dp=2),
        job=BERT,
    ),
    Mutation(
        name="keys that other ranks gathered are seen as a causal model sees them",
        file="parallel/context_parallel/attention_work.py",
        old="segment, here=here, num_places=num_places, is_causal=self.rules.is_causal",
        new="segment, here=here, num_places=num_places, is_causal=True",
        layout=Layout(cp=2, cp_method="all_gather"),
        job=BERT,
    ),
    Mutation(
        name="a ring leaves out later keys",
        file="parallel/context_parallel/attention_work.py",
        old="segment, here=self.ranks.index, source=source, is_causal=self.rules.is_causal",
        new="segment, here=self.ranks.index, source=source, is_causal=self.ranks.size > 1",
        layout=Layout(cp=2),
        job=BERT,
    ),
    Mutation(
        name="each rank reads the pooled state at another rank's position",
        file=HEAD,
        old="place = pairs.first - len(states) * self.sp.tp.index",
        new="place = pairs.first",
        layout=Layout(tp=2, sequence_parallel=True),
        job=BERT,
    ),
    Mutation(
        name="pairs are weighed by a rank's own counts",
        file="train/forward_backward.py",
        old="tokens, pairs = all_reduce(mine, parts.groups.world).unbind()",
        new="tokens, pairs = mine.unbind()",
        layout=Layout(dp=2),
        job=BERT + PACKED,
    ),
    Mutation(
        name="segment ids are of the row, and not of the rank's tokens",
        file="data/loader.py",
        old="EncoderInput(token_types=take(types),",
        new="EncoderInput(token_types=torch.from_numpy(np.stack(types))[:, : take(types).shape[1]],",
        layout=Layout(cp=2),
        job=BERT,
    ),
    Mutation(
        name="packed documents of an encoder see their neighbours",
        file="plan/cp_layout.py",
        old="            start += length // cp",
        new="            start += 0",
        layout=Layout(cp=2),
        job=BERT + PACKED,
    ),
)
ENCODER_PROOFS: tuple[ProofMutation, ...] = (
    ProofMutation(
        name="an encoder is left causal",
        file="model/attention/self_attention.py",
        old="is_causal=parts.family.is_causal,",
        new="is_causal=True,",
        tests=(OUTPUTS,),
    ),
    ProofMutation(
        name="BERT's norms stand before the sum",
        file="model/layers/transformer_block.py",
        old="self._normal(self.attention_sum_norm, x + self.attention_dropout(y, keys))",
        new="x + self._normal(self.attention_sum_norm, self.attention_dropout(y, keys))",
        tests=(OUTPUTS,),
    ),
    ProofMutation(
        name="RoBERTa's positions begin at 0",
        file="model/layers/embedding.py",
        old="positions + self.first_position",
        new="positions",
        tests=(OUTPUTS,),
    ),
    ProofMutation(
        name="an untied head takes the bias that transformers never reads",
        file="convert/huggingface/importer.py",
        old="kept.setdefault(read, kept[old])",
        new="kept[read] = kept[old]",
        tests=(f"{WITNESS}::test_bias_of_an_untied_head_is_the_one_that_is_read",),
    ),
    ProofMutation(
        name="pairs count as much as one masked token",
        file=HEAD,
        old="lambda gradient: gradient * weight",
        new="lambda gradient: gradient",
        tests=(STEPS,),
    ),
    ProofMutation(
        name="masks are alike in all samples",
        file=MASKING,
        old='f"{self.name}/{sample}/{what}"',
        new='f"{self.name}/{what}"',
        tests=(f"{MASK_TESTS}::test_masks_depend_on_seed_sample_and_document_alone",),
    ),
    ProofMutation(
        name="segment ids are shifted by a token",
        file=MASKING,
        old="types = np.repeat(np.arange(len(parts)), [len(part) for part in parts])",
        new="types = np.roll(np.repeat(np.arange(len(parts)), [len(part) for part in parts]), 1)",
        tests=(PAIRS,),
    ),
    ProofMutation(
        name="segments that changed places are told to be in order",
        file=MASKING,
        old="return [text[cut:], text[:cut]], 1",
        new="return [text[cut:], text[:cut]], 0",
        tests=(PAIRS,),
    ),
    ProofMutation(
        name="padding is seen by its document",
        file=MASKING,
        old="documents += [length, padded - length] if padded > length else [length]",
        new="documents += [padded]",
        tests=(f"{MASK_TESTS}::test_documents_end_at_the_multiple_that_they_fill_and_padding_is_a_document_of_its_own",),
    ),
    ProofMutation(
        name="whole words are cut",
        file=MASKING,
        old="            begins[1:] = self.begins_word[segment[1:]]",
        new="            begins[1:] = True",
        tests=(f"{MASK_TESTS}::test_whole_words_are_masked_and_never_across_segments",),
    ),
    ProofMutation(
        name="special tokens are masked",
        file=MASKING,
        old="return [word for word in words if not is_special[word[0] - first]]",
        new="return list(words)",
        tests=(f"{MASK_TESTS}::test_special_tokens_of_a_text_are_never_masked",),
    ),
    ProofMutation(
        name="predicted tokens are read as they are",
        file=MASKING,
        old="        tokens[chosen] = self._read_as(labels[chosen], random)",
        new="        tokens[chosen] = labels[chosen]",
        tests=(f"{MASK_TESTS}::test_eight_of_ten_predicted_tokens_are_read_as_the_mask_and_one_as_itself",),
    ),
    ProofMutation(
        name="one token in five is read at random",
        file=MASKING,
        old="section.mask_replace_prob + section.random_replace_prob)",
        new="section.mask_replace_prob + 2 * section.random_replace_prob)",
        tests=(
            f"{MASK_TESTS}::test_eight_of_ten_predicted_tokens_are_read_as_the_mask_and_one_as_itself",
            f"{MASK_TESTS}::test_masks_have_the_distributions_of_megatron_core",
        ),
    ),
)  # fmt: skip
