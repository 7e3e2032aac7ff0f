"""Planted mistakes in distillation."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import Mutation
from tests.mutations.proofs import ProofMutation

TEACHER = (
    "{family: llama, num_layers: 3, hidden_size: 48, num_heads: 8, ffn_hidden_size: 40, vocab_size: 250, "
    "max_positions: 64}"
)
LIVE = (
    "distillation.loss_type=forward_kl", "distillation.temperature=2.0", "model.vocab_size=250",
    f"distillation.teacher_model={TEACHER}", "data.loss_on=assistant",
)  # fmt: skip
STORED = (
    "distillation.loss_type=forward_kl", "distillation.teacher=stored", "distillation.top_k=6", "distillation.weight=0.9",
)  # fmt: skip
DIVERGENCE, OBJECTIVE = "parallel/tensor_parallel/divergence.py", "model/distillation.py"
DISTILLATION_TESTS = "tests/unit/train/test_distillation.py"
DIVERGENCE_TEST = (
    "tests/dist/parallel/test_divergence.py::test_divergences_are_those_of_the_whole_vocabulary"
)
DISTILLATION: tuple[Mutation, ...] = (
    Mutation(
        name="each tensor-parallel rank takes its own columns for the whole vocabulary",
        file=DIVERGENCE,
        old="    sums = all_reduce(torch.stack([each.exp().sum(-1) for each in shifted]), tp).log_()\n",
        new="    sums = torch.stack([each.exp().sum(-1) for each in shifted]).log_()\n",
        layout=Layout(tp=2),
        job=LIVE,
    ),
    Mutation(
        name="the divergence is that of each tensor-parallel rank's own columns",
        file=DIVERGENCE,
        old="        divergence = all_reduce((weights * ratio).sum(-1), tp)\n",
        new="        divergence = (weights * ratio).sum(-1)\n",
        layout=Layout(tp=2),
        job=LIVE,
    ),
    Mutation(
        name="a stored token of another tensor-parallel rank counts on each",
        file=DIVERGENCE,
        old="        own = weights.masked_fill(is_elsewhere, 0.0)\n",
        new="        own = weights\n",
        layout=Layout(tp=2),
        job=STORED,
    ),
    Mutation(
        name="the divergence is the mean of the means of micro-batches",
        file=OBJECTIVE,
        old="        sums = torch.stack(((divergence * counted).sum(), (losses * counted).sum()))\n",
        new="        mean = 32 * (divergence * counted).sum() / counted.sum().clamp(min=1)\n"
        "        sums = torch.stack((mean, (losses * counted).sum()))\n",
        layout=Layout(dp=2),
        job=(*LIVE, "schedule.micro_batch_size=1"),
    ),
    Mutation(
        name="a context-parallel rank reads the stored logits of the first positions",
        file="data/loader.py",
        old="np.stack([each[at] for each, at in zip(arrays, held, strict=True)])",
        new="np.stack([each[: len(at)] for each, at in zip(arrays, held, strict=True)])",
        layout=Layout(cp=2),
        job=STORED,
    ),
    Mutation(
        name="every micro-batch has the teacher's answer to the first one",
        file="train/distillation/teacher.py",
        old="            replace(batch, teacher=TeacherBatch(hidden=hidden))\n",
        new="            replace(batch, teacher=TeacherBatch(hidden=found[0]))\n",
        layout=Layout(dp=4),
        job=LIVE,
    ),
    Mutation(
        name="the teacher's layers are cut as the model's are",
        file="train/distillation/teacher.py",
        old="    own = teacher_plan(plan)\n",
        new="    own = teacher_plan(plan)\n    own = own if own.grid.pp == 1 else replace(own, stages=own.stages[:1] + plan.stages[1:])\n",
        layout=Layout(pp=2),
        job=LIVE,
    ),
)
DISTILLATION_PROOFS: tuple[ProofMutation, ...] = (
    ProofMutation(
        name="a divergence is over the padded vocabulary",
        file="parallel/tensor_parallel/divergence.py",
        old="    num_real = num_real_columns(padded[0].shape[-1], tp, terms.vocab_size)\n",
        new="    num_real = padded[0].shape[-1]\n",
        tests=(DIVERGENCE_TEST, f"{DISTILLATION_TESTS}::test_the_loss_is_that_of_the_formula"),
    ),
    ProofMutation(
        name="a divergence forgets the temperature",
        file="parallel/tensor_parallel/divergence.py",
        old=".detach().to(wide) / terms.temperature for each in padded]",
        new=".detach().to(wide) / 1.0 for each in padded]",
        tests=(DIVERGENCE_TEST, f"{DISTILLATION_TESTS}::test_the_loss_is_that_of_the_formula"),
    ),
    ProofMutation(
        name="stored logits are not divided by the temperature",
        file="parallel/tensor_parallel/divergence.py",
        old="(top.to(model_log.dtype) / terms.temperature).log_softmax(-1)",
        new="top.to(model_log.dtype).log_softmax(-1)",
        tests=(DIVERGENCE_TEST,),
    ),
    ProofMutation(
        name="a divergence's gradient forgets the temperature",
        file="parallel/tensor_parallel/divergence.py",
        old="1.0 / (terms.temperature * lift)",
        new="1.0 / lift",
        tests=(DIVERGENCE_TEST,),
    ),
    ProofMutation(
        name="the direction of a divergence is swapped",
        file="model/distillation.py",
        old='is_reverse=section.loss_type == "reverse_kl"',
        new='is_reverse=section.loss_type == "forward_kl"',
        tests=(f"{DISTILLATION_TESTS}::test_the_loss_is_that_of_the_formula",),
    ),
    ProofMutation(
        name="a divergence is not scaled by the squared temperature",
        file="model/distillation.py",
        old="share * self.terms.temperature**2 * sums[0]",
        new="share * sums[0]",
        tests=(f"{DISTILLATION_TESTS}::test_the_loss_is_that_of_the_formula",),
    ),
    ProofMutation(
        name="the share of the divergence is that of the cross entropy",
        file="model/distillation.py",
        old="        share = self.section.weight\n",
        new="        share = 1 - self.section.weight\n",
        tests=(f"{DISTILLATION_TESTS}::test_the_loss_is_that_of_the_formula",),
    ),
    ProofMutation(
        name="a teacher is not frozen",
        file="plan/run_plan.py",
        old='    frozen = job.with_values(model={"freeze": ("*",)})\n',
        new="    frozen = job\n",
        tests=(f"{DISTILLATION_TESTS}::test_a_teacher_is_read_and_nothing_else",),
    ),
    ProofMutation(
        name="stored logits of other tokens are taken",
        file="data/distillation/stored_logits.py",
        old='    if how.get("content") != content_of(path):\n',
        new='    if not how.get("content"):\n',
        tests=(
            "tests/unit/evaluate/test_teacher.py::test_logits_of_other_rows_are_refused_before_anything_starts",
        ),
    ),
    ProofMutation(
        name="a reference pass costs nothing",
        file="planner/cost/forward_time.py",
        old="    return sum((_pass_s(each, device, software) for each in passes_before(plan)), 0.0)\n",
        new="    return 0.0\n",
        tests=(
            "tests/unit/planner/cost/test_forward_time.py::test_a_step_has_the_forward_passes_of_its_reference",
        ),
    ),
    ProofMutation(
        name="a teacher's weights take no memory",
        file="planner/cost/teacher_memory.py",
        old="        state_bytes=state.total_bytes,\n",
        new="        state_bytes=0,\n",
        tests=(
            "tests/unit/planner/cost/test_forward_time.py::test_a_teacher_takes_what_its_weights_take",
        ),
    ),
)
