"""Planted mistakes that every layout makes alike, so that no comparison of layouts sees them: each has a test that does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProofMutation:
    """A row: ``old`` in the package's ``file`` becomes ``new``, and each of ``tests`` by itself must fail.

    Attributes:
        name: What is wrong.
        file: Path in the package.
        old: Text that stands in the file exactly once.
        new: What takes its place.
        tests: Tests by pytest's id, without parameters: one of each function's cases must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


CORE = "model/attention/core_attention.py"
CORE_TESTS = "tests/unit/model/attention/test_core_attention.py"
FORMULA = f"{CORE_TESTS}::test_values_and_gradients_are_those_of_the_formula_with_the_mask_given"
DERIVATIVE = f"{CORE_TESTS}::test_backward_is_the_derivative_of_forward"
STEP_TESTS = "tests/unit/train/test_step.py"
ROUTING_STATE = f"{STEP_TESTS}::test_experts_bias_and_counts_move_with_the_weights_alone"
ROWS_TEST = (
    "tests/unit/data/test_rows.py::test_labels_further_ahead_are_those_tokens_of_the_same_piece"
)
DYNAMIC_TEST = "tests/unit/data/test_dynamic_loader.py::test_positions_are_those_in_the_document_and_in_the_sample"
ROPE_TESTS = "tests/unit/model/attention/test_rope.py"
FLOPS_TESTS = "tests/unit/plan/test_flops.py"
TABLE_TESTS = "tests/unit/plan/test_tensor_table.py"
HEAD_TESTS = "tests/unit/model/layers/test_lm_head.py"
RNG = "parallel/core/rng.py"
RNG_TESTS = "tests/unit/parallel/core/test_rng.py"
CUTS_TEST = f"{RNG_TESTS}::test_rows_and_columns_are_bit_for_bit_those_of_the_whole_at_any_chunk"
TUNED_TESTS = "tests/unit/convert/test_tuned.py"
PROOFS: tuple[ProofMutation, ...] = (
    ProofMutation(
        name="LoRA trains its base",
        file="plan/adapters.py",
        old="return not (model.lora.r or any(",
        new="return not (False or any(",
        tests=(
            "tests/unit/plan/test_adapters.py::test_an_adapter_is_cut_as_its_layer_and_alone_is_trained_and_saved",
        ),
    ),
    ProofMutation(
        name="a new head is frozen below adapters",
        file="plan/adapters.py",
        old="    if model.lora.r and _is_of_new_head(name, model):\n        return True\n",
        new="",
        tests=(
            "tests/unit/plan/test_adapters.py::test_a_new_head_is_trained_whole_beside_adapters",
        ),
    ),
    ProofMutation(
        name="a score is read at the padding behind its document",
        file="data/heads/score_batch.py",
        old="            found = here[start : start + length][at[pooling]]\n",
        new="            found = here[start + 1 : start + length + 1][at[pooling]]\n",
        tests=("tests/unit/data/heads/test_score_batch.py::test_padding_is_never_read",),
    ),
    ProofMutation(
        name="KTO weighs desirable answers as the others",
        file="model/preference_losses.py",
        old="good * section.desirable_weight + (1 - good) * section.undesirable_weight",
        new="(1 - good) * section.desirable_weight + good * section.undesirable_weight",
        tests=(
            "tests/unit/model/test_preference_losses.py::test_kto_weighs_answers_by_their_side_of_the_divergence",
        ),
    ),
    ProofMutation(
        name="KTO's divergence is estimated on the answers to their own prompts",
        file="prepare/answers.py",
        old="(answer.conversation, other.under(answer))",
        new="(answer.conversation, answer.under(answer))",
        tests=(
            "tests/unit/prepare/labels/test_labelled_dataset.py::test_an_answer_is_beside_one_to_another_prompt",
        ),
    ),
    ProofMutation(
        name="a merge forgets the scale",
        file="convert/tuned/adapted_weights.py",
        old="part.weight * part.model.lora.scale * (b @ a)",
        new="b @ a",
        tests=(f"{TUNED_TESTS}::test_a_merge_adds_the_scaled_product_to_the_base",),
    ),
    ProofMutation(
        name="a mean of checkpoints forgets its weights",
        file="convert/tuned/merge.py",
        old="[weight / sum(weights) for weight in weights]",
        new="[1 / len(weights) for _ in weights]",
        tests=(f"{TUNED_TESTS}::test_a_mean_has_the_weights_that_are_given",),
    ),
    ProofMutation(
        name="A and B are swapped in PEFT's file",
        file="convert/tuned/peft_names.py",
        old='FACTORS = (".lora_A.weight", ".lora_B.weight")',
        new='FACTORS = (".lora_B.weight", ".lora_A.weight")',
        tests=(f"{TUNED_TESTS}::test_a_file_of_peft_has_its_names_and_comes_back",),
    ),
    ProofMutation(
        name="initial values of a shard begin one element late",
        file=RNG,
        old="drawn[:, before[0] : before[0] + run]",
        new="drawn.roll(-1)[:, before[0] : before[0] + run]",
        tests=(CUTS_TEST, f"{RNG_TESTS}::test_values_are_those_of_the_definition_on_any_box"),
    ),
    ProofMutation(
        name="initial values are the same in every row of a shard",
        file=RNG,
        old="(block - self._next_block) % (1 << 256)",
        new="-self._next_block % (1 << 256)",
        tests=(CUTS_TEST, f"{RNG_TESTS}::test_values_are_those_of_the_definition_on_any_box"),
    ),
    ProofMutation(
        name="a task's targets are scored by the logits of other positions",
        file="model/layers/lm_head.py",
        old="at = order[: micro_batch.num_counted]",
        new="at = order.roll(1)[: micro_batch.num_counted]",
        tests=(
            "tests/dist/runs/test_scores.py::test_one_rank_scores_as_transformers",
            f"{HEAD_TESTS}::test_scores_are_those_of_the_whole_logits_where_a_label_counts_and_nothing_elsewhere",
        ),
    ),
    ProofMutation(
        name="positions of further rows of a micro-batch are those of the first",
        file="model/layers/lm_head.py",
        old="position * len(is_asked) + row)",
        new="position * len(is_asked))",
        tests=(f"{HEAD_TESTS}::test_top_tokens_are_those_of_the_whole_logits_row_by_row",),
    ),
    ProofMutation(
        name="scores of attention with dropout are not scaled",
        file=CORE,
        old="(q.flatten(2, 3) @ k.mT).mul_(ctx.scale)",
        new="(q.flatten(2, 3) @ k.mT)",
        tests=(FORMULA, DERIVATIVE),
    ),
    ProofMutation(
        name="gradients of scores of attention with dropout are not scaled",
        file=CORE,
        old="grad.mul_(ctx.scale).flatten(2, 3)",
        new="grad.flatten(2, 3)",
        tests=(FORMULA, DERIVATIVE),
    ),
    ProofMutation(
        name="kept weights of attention are not scaled up",
        file="parallel/core/dropout.py",
        old="(x * kept).mul_(LEVELS / (LEVELS - _dropped_levels(rate)))",
        new="x * kept",
        tests=(FORMULA,),
    ),
    ProofMutation(
        name="heads that ranks exchange have the masks of the first ones",
        file=CORE,
        old="        first = token_layout.context.inner.index * q.shape[2]",
        new="        first = 0",
        tests=(f"{CORE_TESTS}::test_each_head_has_its_own_mask_whichever_rank_attends_with_it",),
    ),
    ProofMutation(
        name="residual layers are counted once a block",
        file="plan/tensor_table.py",
        old="sqrt(2 * model.num_layers)",
        new="sqrt(model.num_layers)",
        tests=(
            f"{TABLE_TESTS}::test_what_writes_to_the_residual_stream_starts_smaller_by_the_published_rule",
            f"{TABLE_TESTS}::test_gpt2_starts_as_transformers_starts_it",
        ),
    ),
    ProofMutation(
        name="shared experts start as what does not write to the residual stream",
        file="plan/tensor_table.py",
        old="shape[::-1], tp_dim=1, std=_out_std(model))",
        new="shape[::-1], tp_dim=1, std=model.initializer_range)",
        tests=(
            f"{TABLE_TESTS}::test_what_writes_to_the_residual_stream_starts_smaller_by_the_published_rule",
        ),
    ),
    ProofMutation(
        name="routers follow no step",
        file="train/step.py",
        old="        parts.routers.update(totals.routing)\n        parts.weights",
        new="        parts.weights",
        tests=(ROUTING_STATE,),
    ),
    ProofMutation(
        name="routers follow a step whose weights stay",
        file="train/step.py",
        old="    if not (seen.is_overflow or is_left_out):\n        factor",
        new="    if seen.is_overflow or is_left_out:\n        parts.routers.update(totals.routing)\n"
        "    else:\n        factor",
        tests=(ROUTING_STATE,),
    ),
    ProofMutation(
        name="routers of all layers have one jitter",
        file="model/moe/router.py",
        old='f"{name}.jitter"',
        new='"router.jitter"',
        tests=("tests/unit/model/moe/test_router.py::test_each_layer_has_a_jitter_of_its_own",),
    ),
    ProofMutation(
        name="the loss of tokens further ahead has both passes of a step that was done twice",
        file="model/pipeline_stage.py",
        old="        taken, self.mtp_loss_sum = self.mtp_loss_sum, 0.0\n        return taken",
        new="        self.mtp_total = getattr(self, 'mtp_total', 0.0) + self.mtp_loss_sum\n"
        "        return self.mtp_total",
        tests=(f"{STEP_TESTS}::test_mtp_loss_of_a_step_that_is_done_twice_counts_once",),
    ),
    ProofMutation(
        name="the loss of tokens further ahead has that of the search for the first NaN",
        file="train/forward_backward.py",
        old="        module.mtp_loss_sum = 0.0\n",
        new="        module.mtp_loss_sum = module.mtp_loss_sum\n",
        tests=(f"{STEP_TESTS}::test_mtp_loss_after_a_step_that_was_left_out_is_that_step_s_own",),
    ),
    ProofMutation(
        name="experts are summed over the copies of dense weights",
        file="train/build_model.py",
        old="across=groups.expert_copies",
        new="across=groups.copies",
        tests=(
            "tests/unit/train/test_build_model.py::"
            "test_experts_share_their_state_with_the_replicas_of_experts_alone",
        ),
    ),
    ProofMutation(
        name="copies of experts are those of dense weights",
        file="parallel/comm/process_groups.py",
        old='make("expert_copies", _copies(edp, sharers), SUMS)',
        new='make("expert_copies", _copies(replicas, sharers), SUMS)',
        tests=(
            "tests/dist/parallel/test_process_groups.py::"
            "test_experts_are_sharded_within_the_ranks_that_hold_them_and_summed_over_their_copies",
        ),
    ),
    ProofMutation(
        name="positions in a pack go on from one document to the next",
        file="data/dynamic_loader.py",
        old="        positions = positions_of(row.documents)\n",
        new="        positions = np.arange(sum(row.documents))\n",
        tests=(DYNAMIC_TEST,),
    ),
    ProofMutation(
        name="dropout in a pack goes by the place in the pack's document",
        file="data/dynamic_loader.py",
        old="row_positions=take(starts + positions),",
        new="row_positions=take(positions),",
        tests=(DYNAMIC_TEST,),
    ),
    ProofMutation(
        name="YaRN's scale is that of its inverse temperature",
        file="model/attention/rope.py",
        old="1.0 + 0.1 * mscale * log(model.rope_factor)",
        new="(1.0 + 0.1 * mscale * log(model.rope_factor)) ** 2",
        tests=(
            f"{ROPE_TESTS}::test_yarn_scales_as_its_papers_say",
            f"{ROPE_TESTS}::test_yarn_has_the_angles_and_the_scale_of_transformers",
        ),
    ),
    ProofMutation(
        name="YaRN's scale of whole scores is one side's",
        file="model/attention/rope.py",
        old="_yarn_scale(model, model.rope_mscale_all_dim) ** 2",
        new="_yarn_scale(model, model.rope_mscale_all_dim)",
        tests=(f"{ROPE_TESTS}::test_yarn_scales_as_its_papers_say",),
    ),
    ProofMutation(
        name="values of latent attention cost as much as its queries",
        file="plan/flops.py",
        old="(model.head_width + model.value_width)",
        new="(2 * model.head_width)",
        tests=(
            f"{FLOPS_TESTS}::test_deepseek_v3_costs_what_its_authors_say",
            f"{FLOPS_TESTS}::test_scores_and_values_of_latent_attention_have_widths_of_their_own",
        ),
    ),
    ProofMutation(
        name="norms of groups of tensors are not summed",
        file="optim/clip.py",
        old="        sums[groups.index(tensor_group(tensor.name))] += _norm(values).square()\n",
        new="        pass\n",
        tests=(
            "tests/unit/optim/test_clip.py::test_each_group_of_tensors_has_the_squares_of_its_own",
        ),
    ),
    ProofMutation(
        name="a schedule of several chunks takes one",
        file="schedule/table.py",
        old="and sizes.chunks >= 1:",
        new="and sizes.chunks >= 2:",
        tests=(
            "tests/unit/schedule/test_schedules.py::"
            "test_number_of_chunks_that_a_schedule_does_not_have_is_a_fault",
        ),
    ),
    ProofMutation(
        name="a picture is as wide as its times",
        file="schedule/timeline_svg.py",
        old="wanted_px = (last - first) / typical * BLOCK_PX",
        new="wanted_px = (last - first) * BLOCK_PX",
        tests=(
            "tests/unit/schedule/test_timeline_svg.py::"
            "test_width_follows_the_number_of_blocks_and_not_the_unit_of_time",
        ),
    ),
    ProofMutation(
        name="labels further ahead cross the end of a piece whose document goes on",
        file="data/rows.py",
        old="row.mask & ~is_end & np.roll(masks[-1], -1)",
        new="row.mask & np.roll(masks[-1], -1)",
        tests=(ROWS_TEST,),
    ),
    ProofMutation(
        name="a GPU's kernel reads log-sum-exps that are not contiguous",
        file="parallel/context_parallel/attention_blocks.py",
        old="log_sum_exp = whole.log_sum_exp.contiguous()",
        new="log_sum_exp = whole.log_sum_exp",
        tests=(
            "tests/unit/parallel/context_parallel/test_attention_blocks.py::"
            "test_gpus_kernel_gets_contiguous_log_sum_exps",
        ),
    ),
    ProofMutation(
        name="a product reads a block of positions that still travels",
        file="parallel/tensor_parallel/overlap.py",
        old="Block((own + ahead) % count, work)",
        new="Block((own - ahead) % count, work)",
        tests=(
            "tests/unit/parallel/tensor_parallel/test_gather_blocks.py::"
            "test_each_block_is_whole_after_its_own_wait",
        ),
    ),
    ProofMutation(
        name="a run knows the stored reference of its first blend alone",
        file="orchestrate/run_store/run_identity.py",
        old="reference_digests(path) for path in job.dataset_paths",
        new="reference_digests(path) for path in [each.path for each in job.data.blends[0][1]]",
        tests=(
            "tests/unit/evaluate/test_reference.py::test_every_dataset_of_a_job_keeps_its_reference",
        ),
    ),
    ProofMutation(
        name="an evaluation beside a run keeps the cores that training waits for",
        file="evaluate/beside_worker.py",
        old="os.SCHED_IDLE, os.sched_param(0)",
        new="os.SCHED_OTHER, os.sched_param(0)",
        tests=(
            "tests/unit/evaluate/test_beside_worker.py::"
            "test_scoring_and_the_threads_that_it_starts_yield_to_ordinary_ones",
        ),
    ),
    ProofMutation(
        name="workers beside a run are as any others",
        file="evaluate/scoring.py",
        old="EntryWorkers(plan, ENTRY_BESIDE, log_dir=LOG_DIR)",
        new="EntryWorkers(plan, ENTRY, log_dir=LOG_DIR)",
        tests=("tests/unit/evaluate/test_beside_worker.py::test_workers_beside_a_run_alone_yield",),
    ),
    ProofMutation(
        name="what is needed of a cache is read while readers change it",
        file="data/streaming/fetcher.py",
        old="        with self._changed:\n            own = ",
        new="        if True:\n            own = ",
        tests=(
            "tests/unit/data/test_shard_cache.py::"
            "test_what_is_needed_is_read_under_the_lock_under_which_readers_change_it",
        ),
    ),
    ProofMutation(
        name="an error that nobody expected ends the thread that fetches and is told to no reader",
        file="data/streaming/fetcher.py",
        old="        except Exception as error:\n",
        new="        except ZeroDivisionError as error:\n",
        tests=(
            "tests/unit/data/test_shard_cache.py::test_error_that_nobody_expected_is_the_readers",
        ),
    ),
)
