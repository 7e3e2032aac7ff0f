"""Planted mistakes in a frozen base that is held as codes."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import EXPERTS, Mutation
from tests.mutations.proofs import ProofMutation

# rows of 32 are one short block, those of 160 are cut inside a block, and 320 rows have two blocks of scales
NF4 = ("model.lora={r: 4, base_dtype: nf4}", "model.ffn_hidden_size=160")
MANY_ROWS = ("model.lora={r: 4, base_dtype: nf4}", "model.ffn_hidden_size=320")
EXPERT_NF4 = (*EXPERTS, "model.lora={r: 4, base_dtype: nf4}")
BUCKET, CODES = "parallel/data_parallel/coded_bucket.py", "parallel/core/block_codes.py"
BASE_BLOCKS: tuple[Mutation, ...] = (
    Mutation(
        name="each tensor-parallel rank has scales of its own",
        file=BUCKET,
        old='            all_reduce(whole, self._cut, "max")',
        new="            pass",
        layout=Layout(tp=2),
        job=NF4,
    ),
    Mutation(
        name="blocks begin anew where tensor parallelism cuts a row",
        file=CODES,
        old="torch.arange(columns, device=device) + first % BLOCK",
        new="torch.arange(columns, device=device)",
        layout=Layout(tp=2),
        job=NF4,
    ),
    Mutation(
        name="a rank counts scales of scales from its own first row",
        file=BUCKET,
        old="        row, first = self.piece.box.offset[-2], box_blocks(self.piece.box)[0]\n        _, rows",
        new="        row, first = 0, box_blocks(self.piece.box)[0]\n        _, rows",
        layout=Layout(tp=2),
        job=MANY_ROWS,
    ),
    Mutation(
        name="the experts of a rank share a mean scale",
        file=BUCKET,
        old="encode_scales(whole.flatten(1))",
        new="encode_scales(whole.view(1, -1))",
        layout=Layout(dp=2, ep=2),
        job=EXPERT_NF4,
    ),
)
STEPS = "tests/dist/model/test_quantized_base.py::test_steps_are_those_of_peft_over_the_quantized_weights"
MERGED = "tests/dist/model/test_quantized_base.py::test_a_merge_adds_to_the_weights_that_the_run_computed_with"
UNIT = "tests/unit/parallel/core/test_block_codes.py"
PUBLISHED = f"{UNIT}::test_weights_are_those_of_the_published_arithmetic"
BASE_BLOCK_PROOFS: tuple[ProofMutation, ...] = (
    ProofMutation(
        name="ranks that share codes have scales of their own parts",
        file=BUCKET,
        old='            all_reduce(whole, self.bucket.sharing.inside, "max")',
        new="            pass",
        tests=(STEPS,),
    ),
    ProofMutation(
        name="the base is read into its codes' initial values alone",
        file="train/start/weights.py",
        old="            source.load(blocks, progress)",
        new="            pass",
        tests=(STEPS,),
    ),
    ProofMutation(
        name="a merge takes the base as it was before its codes",
        file="convert/tuned/adapted_weights.py",
        old="coded = through_blocks(held, base_dtype)",
        new="coded = held",
        tests=(MERGED,),
    ),
    ProofMutation(
        name="the mean scale is not added again",
        file=CODES,
        old=" + mean[:, None, None]",
        new="",
        tests=(PUBLISHED,),
    ),
    ProofMutation(
        name="blocks have 128 weights",
        file="plan/layers/base_blocks.py",
        old="BLOCK = 64",
        new="BLOCK = 128",
        tests=(PUBLISHED,),
    ),
    ProofMutation(
        name="weights are divided by the scale after its own quantisation",
        file=CODES,
        old="    packed = pack(encode(rows, maxima, 0, base_dtype)",
        new="    packed = pack(encode(rows, decoded.view(-1, blocks), 0, base_dtype)",
        tests=(PUBLISHED,),
    ),
    ProofMutation(
        name="the plan forgets the scales",
        file="plan/memory/elements.py",
        old="for share in shares) + self.scale_bytes",
        new="for share in shares)",
        tests=(f"{UNIT}::test_a_base_in_blocks_takes_about_four_bits_an_element",),
    ),
)
