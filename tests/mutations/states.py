"""Planted mistakes in layers with states, gated delta nets and Mamba-2; recurrences or transformers see each."""

from __future__ import annotations

from tests.mutations.families import LOGITS, STEPS, WAY_BACK
from tests.mutations.proofs import ProofMutation

DELTA_TESTS = "tests/unit/model/linear_attention/test_delta_rule.py"
CHUNKS = f"{DELTA_TESTS}::test_chunks_give_what_the_recurrence_gives_document_by_document"
CONVOLUTION = f"{DELTA_TESTS}::test_convolution_begins_anew_with_each_document"
GRIDS = "tests/dist/parallel/test_linear_attention.py::test_layer_is_the_recurrence_on_each_grid"
ALONE = "tests/dist/model/test_packing.py::test_packed_rows_give_what_their_documents_give_alone"
SIZES_LOGITS = (
    "tests/dist/model/test_layer_sizes.py::test_logits_are_those_of_layers_with_these_sizes"
)
STAGE_BYTES = (
    "tests/dist/model/test_activation_bytes.py::test_plan_predicts_stages_of_blocks_that_differ"
)
STAGE_TIMES = (
    "tests/unit/planner/cost/test_block_times.py"
    "::test_stages_of_unlike_layers_have_times_of_their_own_and_add_up_to_the_whole"
)
LISTS = (
    "tests/unit/checkpoint/load/test_init_from.py::test_lists_by_layer_are_compared_layer_by_layer"
)
AVERAGE = (
    "tests/dist/runs/test_average_evaluation.py::"
    "test_loss_of_the_average_is_that_of_the_formula_and_changes_nothing"
)
DELTA_RULE = "model/linear_attention/delta_rule.py"
DELTA_NET = "model/linear_attention/gated_delta_net.py"
MAMBA = "model/linear_attention/mamba2.py"
STATE_LAYER = "model/linear_attention/state_layer.py"
EXCHANGE = "parallel/context_parallel/ulysses.py"
STATES: tuple[ProofMutation, ...] = (
    ProofMutation(
        name="a state goes on into the next document",
        file=DELTA_RULE,
        old="back[-1:].mT <= last, last >= CHUNK",
        new="back[-1:].mT <= last, last >= 0",
        tests=(CHUNKS,),
    ),
    ProofMutation(
        name="tokens of a chunk see states of the document before",
        file=DELTA_RULE,
        old="(back >= 0) & (back <= at)",
        new="(back >= 0) & (back <= CHUNK)",
        tests=(CHUNKS, GRIDS, ALONE),
    ),
    ProofMutation(
        name="a convolution sees the document before",
        file=DELTA_RULE,
        old="is_same = (positions >= back)",
        new="is_same = (positions >= 0)",
        tests=(CONVOLUTION, GRIDS, ALONE),
    ),
    ProofMutation(
        name="a token replaces what its key holds whole, and not a share beta",
        file=DELTA_RULE,
        old="(v * beta, k * beta * decays.read)",
        new="(v * beta, k * decays.read)",
        tests=(CHUNKS,),
    ),
    ProofMutation(
        name="a state reads beta twice inside a chunk",
        file=DELTA_RULE,
        old="system = k @ k.mT * decays.between * beta",
        new="system = k @ k.mT * decays.between * beta * beta",
        tests=(CHUNKS, GRIDS),
    ),
    ProofMutation(
        name="states grow instead of decay",
        file=DELTA_NET,
        old="decay=-decay_log.exp()",
        new="decay=decay_log.exp()",
        tests=(GRIDS,),
    ),
    ProofMutation(
        name="what is read of a state is gated before its norm",
        file=DELTA_NET,
        old="""        normal = self.norm(y.flatten(2).unflatten(-1, (self.num_groups * self.ratio, -1)))
        return normal.flatten(2) * silu(z)
""",
        new="""        gated = y.flatten(2) * silu(z)
        return self.norm(gated.unflatten(-1, (self.num_groups * self.ratio, -1))).flatten(2)
""",
        tests=(GRIDS,),
    ),
    ProofMutation(
        name="a state takes the ranks' tokens end to end, not in the order of the row",
        file=EXCHANGE,
        old="return x if order is None else _reorder(x, *order)",
        new="return x",
        tests=(GRIDS,),
    ),
    ProofMutation(
        name="ranks that exchange heads use the first heads' decays and convolutions",
        file=STATE_LAYER,
        old="return slice(first, first + count)",
        new="return slice(0, count)",
        tests=(GRIDS,),
    ),
    ProofMutation(
        name="tp ranks do not sum the gradients of the states' norm",
        file="plan/layers/state_tensors.py",
        old="serves_heads=True",
        new="serves_heads=False",
        tests=(GRIDS,),
    ),
    ProofMutation(
        name="value heads have the decays of other key heads",
        file=DELTA_NET,
        old="t.to(wide.dtype).view(self.num_groups, -1)[own] for t",
        new="t.to(wide.dtype).view(-1, self.num_groups).mT[own] for t",
        tests=(GRIDS,),
    ),
    ProofMutation(
        name="what is read of a sum is normalised before its gate",
        file=MAMBA,
        old="""        gated = y * silu(z).unflatten(-1, (self.num_groups, -1))
        return rms_norm(gated, weights, self.eps).flatten(2)
""",
        new="""        return rms_norm(y, weights, self.eps).flatten(2) * silu(z)
""",
        tests=(GRIDS,),
    ),
    ProofMutation(
        name="a step below the least stays as it is",
        file=MAMBA,
        old=".clamp(min=self.least_step)",
        new="",
        tests=(GRIDS,),
    ),
    ProofMutation(
        name="a value is added without its step",
        file=MAMBA,
        old="scan(q, k, x * step[..., None], decay, positions)",
        new="scan(q, k, x, decay, positions)",
        tests=(GRIDS,),
    ),
    ProofMutation(
        name="a block of one part has the norm of none",
        file="model/families.py",
        old='mlp_norm=norm("mlp_norm") if has_mixer else one_part,',
        new='mlp_norm=norm("mlp_norm"),',
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="attention's output has no gate",
        file="model/attention/self_attention.py",
        old="return y if gate is None else y * gate.sigmoid()",
        new="return y",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="rows of stacked projections alternate by value heads",
        file="convert/huggingface/names.py",
        old="family.key_head_wise: model.linear_attention.num_key_heads,",
        new="family.key_head_wise: model.linear_attention.num_value_heads,",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="weights of a convolution do not decay",
        file="optim/param_groups.py",
        old='role in ("matrix", "head", "filter")',
        new='role in ("matrix", "head")',
        tests=(STEPS,),
    ),
    ProofMutation(
        name="experts of Nemotron-H have GELU",
        file="model/families.py",
        old="inside = make_gate(activation, model) if has_gate else named_activation(activation)",
        new="inside = make_gate(activation, model) if has_gate else None",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="experts of Nemotron-H take a width that their config.json does not say",
        file="convert/huggingface/moe_config.py",
        old="""return {**values, "shared_expert_intermediate_size": shared}""",
        new="""return {**values, "shared_expert_intermediate_size": 0 * shared}""",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="an export says that an indexer chooses twice as many tokens",
        file="convert/huggingface/families/deepseek_v32.py",
        old="**theirs(_SIZES, model.mla),",
        new="**theirs(_SIZES, model.mla), 'index_topk': 2 * model.mla.index_topk,",
        tests=(WAY_BACK,),
    ),
    ProofMutation(
        name="an indexer's weights are trained",
        file="plan/tensor_table.py",
        old="replace(each, is_frozen=True, is_carried=True)",
        new="replace(each, is_carried=True)",
        tests=(STEPS,),
    ),
    ProofMutation(
        name="all layers attend with the heads of the largest",
        file="model/families.py",
        old='name, model = f"{at}.attention", sized_model(model, layer)',
        new='name = f"{at}.attention"',
        tests=(SIZES_LOGITS,),
    ),
    ProofMutation(
        name="widths by layer begin with the second",
        file="config/attention.py",
        old="sizes[layer % len(sizes)] for name",
        new="sizes[(layer + 1) % len(sizes)] for name",
        tests=(SIZES_LOGITS,),
    ),
    ProofMutation(
        name="a stage's bytes are those of its first kind of block",
        file="plan/memory/activation_shape.py",
        old="groups.setdefault(layer_kind(self.model, number), []).append(number)",
        new="groups.setdefault(layer_kind(self.model, 0), []).append(number)",
        tests=(STAGE_BYTES,),
    ),
    ProofMutation(
        name="a stage of states takes as long as one of attention",
        file="planner/cost/block_times.py",
        old="if self.kinds:",
        new="if shape.model.layer_sizes.is_on:",
        tests=(STAGE_TIMES,),
    ),
    ProofMutation(
        name="a list by layer of another length is another model",
        file="plan/init_from_rules.py",
        old="lists[0][n % len(lists[0])] == lists[1][n % len(lists[1])]",
        new="lists[0] == lists[1]",
        tests=(LISTS,),
    ),
    ProofMutation(
        name="a run goes on with the average of its weights",
        file="optim/optimizer.py",
        old="        finally:  # of a body that failed too: what this rank holds may continue in memory\n"
        "            self._exchange()\n",
        new="        finally:\n",
        tests=(AVERAGE,),
    ),
    ProofMutation(
        name="an average that waits on the host is exchanged with a copy",
        file="optim/optimizer.py",
        old="average = self._host.on_host(bucket_state.average)",
        new="average = self._host.on_host(bucket_state.average).clone()",
        tests=(AVERAGE,),
    ),
    ProofMutation(
        name="a mixture of weights and average is held as the state of a step",
        file="checkpoint/load/held_state.py",
        old="scalars if is_back() else {}",
        new="scalars",
        tests=(
            "tests/unit/optim/test_moving_average.py::"
            "test_nothing_is_held_of_an_exchange_that_failed_half_way",
        ),
    ),
)
