"""Planted mistakes: scales in fp8 that know a layout."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import EXPERTS, Mutation

ROWWISE = ("precision.fp8=rowwise", "precision.fp8_end_blocks=0")

FP8: tuple[Mutation, ...] = (
    Mutation(
        name="a token's scale is that of its features on this rank",
        file="parallel/tensor_parallel/fp8_linear.py",
        old="self._largest_over(x, cut if self.by_row else self.micro)",
        new="self._largest_over(x, None if self.by_row else self.micro)",
        layout=Layout(tp=2),
        job=ROWWISE,
    ),
    Mutation(
        name="a tensor's scale is that of this rank's tokens",
        file="parallel/tensor_parallel/fp8_linear.py",
        old="self._largest_over(x, cut if self.by_row else self.micro)",
        new="self._largest_over(x, cut)",
        layout=Layout(cp=2, micro_batch_size=2),
        job=("precision.fp8=tensorwise", "precision.fp8_end_blocks=0"),
    ),
    Mutation(
        name="a weight's columns are scaled by what this rank has of them",
        file="parallel/tensor_parallel/fp8_linear.py",
        old="lambda: self._of_weight(turned.contiguous(), place.outer)",
        new="lambda: self._of_weight(turned.contiguous(), None)",
        layout=Layout(tp=2),
        job=ROWWISE,
    ),
    Mutation(
        name="blocks that stay wide are counted from each stage's own begin",
        file="model/pipeline_stage.py",
        old="of_fp8 if i in in_fp8 else factory",
        new="of_fp8 if i - stage.layers[0] in in_fp8 else factory",
        layout=Layout(pp=2),
        job=("model.num_layers=4", "precision.fp8=rowwise"),
    ),
    Mutation(
        name="an expert's rows are scaled by their features on this rank",
        file="parallel/expert_parallel/fp8_grouped_gemm.py",
        old="place.fp8.quantise(rows, place.inner, FORWARD)",
        new="place.fp8.quantise(rows, None, FORWARD)",
        layout=Layout(tp=2, etp=2),
        job=(*EXPERTS, *ROWWISE),
    ),
    Mutation(
        name="rows of an expert's gradient are scaled by their features on this rank",
        file="parallel/expert_parallel/fp8_grouped_gemm.py",
        old="place.fp8.quantise(grad, place.outer, place.fp8.gradient_format)",
        new="place.fp8.quantise(grad, None, place.fp8.gradient_format)",
        layout=Layout(tp=2, etp=2),
        job=(*EXPERTS, *ROWWISE),
    ),
)
