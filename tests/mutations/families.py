"""Planted mistakes in the parts of model families; transformers or attention written out sees each."""

from __future__ import annotations

from tests.mutations.proofs import ProofMutation

ATTENTION_TESTS = "tests/dist/parallel/test_context_attention.py"
DENSE = f"{ATTENTION_TESTS}::test_windows_caps_and_sinks_equal_dense"
WITNESS = "tests/dist/model/test_hugging_face.py"
LOGITS = f"{WITNESS}::test_logits_of_families_are_those_of_transformers"
WAY_BACK = f"{WITNESS}::test_way_back_of_families_is_bit_exact"
STEPS = f"{WITNESS}::test_steps_of_families_are_those_of_a_plain_loop"
BLOCKS = "parallel/context_parallel/attention_blocks.py"
NORMS = "model/layers/norms.py"
BLOCK = "model/layers/transformer_block.py"
CLAMP = "model/layers/clamped_swiglu.py"
QUANTIZED = "convert/quantized_weights.py"
CODES = "tests/unit/convert/test_quantized_weights.py"
MXFP4 = f"{CODES}::test_mxfp4_is_multiplied_out_as_transformers_does"
FLOAT8 = f"{CODES}::test_float8_blocks_are_multiplied_out_as_transformers_does"
CUT_EXPERTS = f"{WITNESS}::test_steps_with_experts_are_those_of_a_plain_loop"
ROPE = "model/attention/rope.py"
FAMILIES: tuple[ProofMutation, ...] = (
    ProofMutation(
        name="a window has one token more",
        file=BLOCKS,
        old="seen.tril(self.distance - self.rules.window)",
        new="seen.tril(self.distance - self.rules.window - 1)",
        tests=(DENSE, LOGITS),
    ),
    ProofMutation(
        name="a block leaves out the oldest key of its window",
        file="plan/cp_layout.py",
        old="oldest = q_first + first - window + 1 if window else 0",
        new="oldest = q_first + first - window + 2 if window else 0",
        tests=(DENSE,),
    ),
    ProofMutation(
        name="a block of late tokens is masked as if it began with its keys",
        file="plan/cp_layout.py",
        old="distance=q_first + first - begin,",
        new="distance=0,",
        tests=(DENSE,),
    ),
    ProofMutation(
        name="scores are capped before they are scaled",
        file=BLOCKS,
        old="return scores.div_(cap).tanh_().mul_(cap) if cap else scores",
        new="return scores.div_(cap / 2).tanh_().mul_(cap / 2) if cap else scores",
        tests=(DENSE, LOGITS),
    ),
    ProofMutation(
        name="backward forgets the slope of the cap",
        file=BLOCKS,
        old="slope = (slope if rise is None else slope.mul_(rise))",
        new="slope = slope",
        tests=(DENSE, STEPS),
    ),
    ProofMutation(
        name="sinks are merged twice",
        file="parallel/context_parallel/attention_work.py",
        old="        return self.out.to(self._q.dtype)",
        new="            merge_sinks(AttentionTile(self.out.permute(1, 2, 0, 3), self.log_sum_exp), sinks)\n"
        "        return self.out.to(self._q.dtype)",
        tests=(DENSE,),
    ),
    ProofMutation(
        name="sinks have the wrong sign in backward",
        file=BLOCKS,
        old="return -(weights * drift).sum((0, 2))",
        new="return (weights * drift).sum((0, 2))",
        tests=(DENSE,),
    ),
    ProofMutation(
        name="ranks that exchange heads use the first heads' sinks",
        file="parallel/context_parallel/attention.py",
        old="sinks[first : first + q.shape[2]]",
        new="sinks[: q.shape[2]]",
        tests=(DENSE,),
    ),
    ProofMutation(
        name="partial RoPE turns the last features",
        file=ROPE,
        old="(part[..., :turned].chunk(2, dim=-1) for part in (wide, y))",
        new="(part[..., x.shape[-1] - turned :].chunk(2, dim=-1) for part in (wide, y))",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="sliding layers turn by the base of the others",
        file=ROPE,
        old="return token_layout.local_rotations if self.is_local else token_layout.rotations",
        new="return token_layout.rotations",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="linear scaling compresses wavelengths",
        file=ROPE,
        old="return plain / model.rope_factor",
        new="return plain * model.rope_factor",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="a norm with an offset multiplies by its weight alone",
        file=NORMS,
        old="return rms_norm(x, weight, eps, is_fused=is_fused, is_offset=True)",
        new="return rms_norm(x, weight, eps, is_fused=is_fused)",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="a norm over all heads counts its own rank's squares",
        file=NORMS,
        old="return all_reduce(x.clone(), self.tp) / sharers",
        new="return x.clone()",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="a norm comes before what it follows",
        file="model/families.py",
        old='after = norm("attention_post_norm"), norm("mlp_post_norm")',
        new='after = norm("mlp_post_norm"), norm("attention_post_norm")',
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="parallel parts are computed one after the other",
        file=BLOCK,
        old="x if self.is_parallel else after",
        new="after",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="the factor on residual sums is forgotten",
        file=BLOCK,
        old="return y if self.factor == 1.0 else y * self.factor",
        new="return y",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="the gate has GELU's exact form",
        file="model/layers/mlp.py",
        old='"gelu_tanh": gelu_tanh,',
        new='"gelu_tanh": gelu,',
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="logits are capped and not divided",
        file="model/layers/lm_head.py",
        old="torch.tanh(logits / self.softcap) * self.softcap",
        new="torch.tanh(logits) * self.softcap",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="the embedding is not scaled",
        file="model/families.py",
        old="factor = model.multipliers.embedding * width",
        new="factor = model.multipliers.embedding",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="heads of stacked queries, keys and values do not alternate",
        file="convert/huggingface/names.py",
        old="groups = rows.reshape(self.num_heads, -1, *rows.shape[1:])",
        new="return rows\n        groups = rows.reshape(self.num_heads, -1, *rows.shape[1:])",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="kinds of layers begin with the second",
        file="plan/layers/layer_pattern.py",
        old="attention.layer_types[layer % len",
        new="attention.layer_types[(layer + 1) % len",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="a clamped gate keeps its slope beyond the limit",
        file=CLAMP,
        old="by_gate.masked_fill_(raw_gate > limit, 0.0)",
        new="by_gate.masked_fill_(raw_gate > 2 * limit, 0.0)",
        tests=(STEPS,),
    ),
    ProofMutation(
        name="the clamped gate multiplies up without 1",
        file=CLAMP,
        old=".mul_(up.add_(1))",
        new=".mul_(up)",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="ranks that share an expert's features add the same columns of its bias",
        file="model/moe/experts.py",
        old="self.down_bias.spec.pieces[0].box.offset[1]",
        new="self.down_bias.spec.pieces[0].box.offset[0]",
        tests=(CUT_EXPERTS,),
    ),
    ProofMutation(
        name="gate and up of all experts follow one another where they alternate",
        file="convert/huggingface/names.py",
        old="return rows[:, number::count] if self.is_interleaved",
        new="return rows[:, number::count] if not self.is_interleaved",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="YaRN's blend lies between whole numbers always",
        file=ROPE,
        old="if model.rope_truncate:",
        new="if True:",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="the router's bias is left out",
        file="model/moe/router.py",
        old="return linear(seen, self.weight.to(wide), bias)",
        new="return linear(seen, self.weight.to(wide))",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="a chunk begins a token late",
        file="plan/cp_layout.py",
        old="oldest = (q_first + first) // chunk * chunk",
        new="oldest = (q_first + first) // chunk * chunk + 1",
        tests=(DENSE,),
    ),
    ProofMutation(
        name="chunks are counted from a rank's own tokens",
        file="plan/cp_layout.py",
        old="chunk - (q_first + first) % chunk",
        new="chunk - first % chunk",
        tests=(DENSE,),
    ),
    ProofMutation(
        name="temperature grows a token late",
        file="model/attention/self_attention.py",
        old="steps = (token_layout.positions + 1) // floor",
        new="steps = token_layout.positions // floor",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="experts weigh what they return",
        file="model/moe/layer.py",
        old="self.weighs_inputs = moe.apply_probs_on_input",
        new="self.weighs_inputs = False",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="layers without RoPE have norms of queries and keys",
        file="model/attention/self_attention.py",
        old='if parts.family.qk_norm == "l2" and parts.rope != "none":',
        new='if parts.family.qk_norm == "l2":',
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="the upper half of a byte is the first code",
        file=QUANTIZED,
        old="np.stack((codes & 0x0F, codes >> 4), -1)",
        new="np.stack((codes >> 4, codes & 0x0F), -1)",
        tests=(MXFP4,),
    ),
    ProofMutation(
        name="exponents of blocks have another bias",
        file=QUANTIZED,
        old="E8M0_BIAS = 127",
        new="E8M0_BIAS = 128",
        tests=(MXFP4,),
    ),
    ProofMutation(
        name="float8 has an exponent's bias of 8",
        file=QUANTIZED,
        old="np.ldexp(1 + mantissa / 8, exponent - 7)",
        new="np.ldexp(1 + mantissa / 8, exponent - 8)",
        tests=(FLOAT8,),
    ),
)
