"""What autograd keeps, to the byte: the published formulas, and plan.activations' own."""

import pytest
import torch

from raymega.config.schema import MemorySection, ParallelSection
from raymega.model.pipeline_stage import StageModule
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel.context import Rows, held_positions, make_context
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import Grid
from raymega.plan.memory.activation_bytes import layer_bytes, peak_bytes, stage_activations
from raymega.plan.memory.activation_shape import ActivationShape
from raymega.plan.stages import make_stages
from raymega.schedule.order import Sizes
from raymega.schedule.schedules.one_f_one_b import one_f_one_b
from tests.support.ranks import run_grid
from tests.support.references import plain_models
from tests.support.saved_tensor_bytes import SavedBytes
from tests.unit.model.parts import CPU

pytestmark = pytest.mark.dist

S, B, LAYERS = 64, 2, 2
_, MIDDLE, _ = make_stages((LAYERS, LAYERS, LAYERS))
(WHOLE,) = make_stages((LAYERS,))
STAGES = (MIDDLE, WHOLE)
SIZES = {
    "hidden_size": 64,
    "num_heads": 4,
    "ffn_hidden_size": 256,
    "max_positions": S,
    "num_layers": 6,
}
MLA = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
ADAPTED = {"r": 4, "lora_dropout": 0.05}
STATES = {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 8, "value_head_dim": 12}
SLIDING = {"layer_types": ("sliding", "full"), "sliding_window": 16}
DROPPED = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
CORE = MemorySection(recompute="selective", recompute_parts=("attention",))
ALL = MemorySection(recompute="selective", recompute_parts=("attention", "activation", "norm"))
FULL = MemorySection(recompute="full")
PAIRS = MemorySection(recompute="full", recompute_every=2)
GPT2 = plain_models.make_model("gpt2", **SIZES, **DROPPED)
FUSED = plain_models.make_model("gpt2", **SIZES, hidden_dropout=0.1)
MODELS = {
    "gpt2-dropped": GPT2,
    "gpt2": FUSED,
    "llama": plain_models.make_model("llama", **SIZES, num_kv_heads=2),
    "llama-dropped": plain_models.make_model("llama", **SIZES, num_kv_heads=2, **DROPPED),
    "qwen3": plain_models.make_model("qwen3", **SIZES, num_kv_heads=2),
    "mla": plain_models.make_model("llama", **SIZES, num_kv_heads="num_heads", mla=MLA),
    "mla-square": plain_models.make_model(
        "llama", **SIZES, num_kv_heads="num_heads", mla={**MLA, "q_lora_rank": 0, "v_head_dim": 24}
    ),
    "mtp": plain_models.make_model("llama", **SIZES, num_kv_heads=2, num_nextn_predict_layers=2),
    "lora": plain_models.make_model("llama", **SIZES, num_kv_heads=2, lora={"r": 4}),
    "lora-dropped": plain_models.make_model("llama", **SIZES, num_kv_heads=2, lora=ADAPTED),
    "dora": plain_models.make_model(
        "llama", **SIZES, num_kv_heads=2, lora={"r": 4, "use_dora": True}
    ),
    "lora-mla": plain_models.make_model(
        "llama", **SIZES, num_kv_heads="num_heads", mla=MLA, lora=ADAPTED
    ),
    "gemma2": plain_models.make_model("gemma2", **SIZES, num_kv_heads=2),
    "gemma2-capped": plain_models.make_model(
        "gemma2",
        **SIZES,
        num_kv_heads=2,
        attention={"softcap": 50.0, **SLIDING},
        multipliers={"logit_softcap": 30.0},
    ),
    "gemma3": plain_models.make_model("gemma3", **SIZES, num_kv_heads=2, attention=SLIDING),
    "olmo3": plain_models.make_model("olmo3", **SIZES, num_kv_heads=2, attention=SLIDING),
    "minimax_m2": plain_models.make_model("minimax_m2", **SIZES, num_kv_heads=2),
    "qwen3-sinks": plain_models.make_model(
        "qwen3", **SIZES, num_kv_heads=2, attention={"sinks": True}
    ),
    "gpt_oss": plain_models.make_model(
        "gpt_oss", **SIZES, num_kv_heads=2, attention={"sinks": True, **SLIDING}
    ),
    "llama4": plain_models.make_model(
        "llama4",
        **SIZES,
        num_kv_heads=2,
        attention={
            "layer_types": ("chunked", "no_positions"),
            "chunk_size": 16,
            "temperature_floor": 8,
        },
    ),
    "llama4-full": plain_models.make_model("llama4", **SIZES, num_kv_heads=2),
    "qwen3_next": plain_models.make_model(
        "qwen3_next",
        **SIZES,
        num_kv_heads=2,
        attention={"layer_types": ("gated_delta_net", "full")},
        linear_attention=STATES,
    ),
    "nemotron_h": plain_models.make_model(
        "nemotron_h",
        **SIZES,
        num_kv_heads=2,
        attention={"layer_types": ("mamba2", "feed_forward")},
        linear_attention=STATES,
    ),
    "uneven": plain_models.make_model(
        "qwen3",
        **SIZES,
        head_dim=16,
        num_kv_heads=2,
        layer_sizes={
            "num_heads": (4, 4, 2, 4, 4, 2),
            "num_kv_heads": (2, 2, 2, 2, 2, 2),
            "ffn_hidden_size": (64, 128, 256, 192, 32, 96),
        },
    ),
    "phi3": plain_models.make_model("phi3", **SIZES, num_kv_heads=2),
    "olmo2": plain_models.make_model("olmo2", **SIZES, num_kv_heads=2),
    "gpt_neox": plain_models.make_model("gpt_neox", **SIZES),
    "qwen2-mha": plain_models.make_model("qwen2", **SIZES, num_kv_heads="num_heads"),
}

SLOW = (
    "lora-mla",
    "gemma2-capped",
    "gemma3",
    "minimax_m2",
    "qwen3-sinks",
    "phi3",
    "gpt_oss",
    "llama4",
    "llama4-full",
    "qwen3_next",
    "nemotron_h",
    "uneven",
)
WIDE = pytest.mark.wide


def _measure(env, model, memory, stage, is_cut):
    """Bytes that a rank keeps of one micro-batch in bf16."""
    sp = SequenceParallel(tp=env.groups.tp, is_sequence_parallel=is_cut)
    module = StageModule(model, stage, sp=sp, dtype=torch.bfloat16, device=CPU, seed=1)
    module.recompute(memory)
    tokens = torch.zeros(B, S, dtype=torch.int64)
    mask, samples = torch.ones(B, S), torch.arange(B)
    hidden = None
    if not stage.is_first:
        hidden = torch.randn(S // sp.degree, B, model.hidden_size).bfloat16().requires_grad_()
    known = [*module.parameters(), *module.buffers(), tokens, mask]
    with SavedBytes(known) as kept:
        later = torch.stack([tokens] * 2), torch.stack([mask] * 2)
        module(tokens, tokens, mask, hidden, samples, later=later)
    return kept.total


LAYOUTS = pytest.mark.parametrize(
    ("tp", "is_cut"), [(1, False), (2, False), (2, True), (4, True)], ids=["tp1", "tp2", "tp2-sp", "tp4-sp"]
)  # fmt: skip


def _equal_on_all_ranks(totals):
    assert len({tuple(of_rank) for of_rank in totals}) == 1, "ranks keep the same"
    return totals[0]


def _planned(model, parallel, memory, stage):
    shape = ActivationShape(
        model=model,
        parallel=parallel,
        memory=memory,
        seq_len=S,
        micro_batch_size=B,
        dtype="bfloat16",
    )
    return stage_activations(shape, stage).micro_batch_bytes


@LAYOUTS
def test_layer_keeps_what_the_published_formulas_say(tp, is_cut):
    """Korthikanti et al. 2022, equations 2, 4, 6 and table 2, in bytes of bf16.

    Beyond them: the norms' statistics; without attention dropout, torch's fused attention keeps a
    number a row where the formula has 5 as/h. Below them: with the attention core the input of the
    projection after it, 2 sbh / t, is made again too.
    """
    heads, width, sp = GPT2.num_heads, GPT2.hidden_size, tp if is_cut else 1
    attention = 5 * heads * S / (width * tp)
    log_sum_exp, statistics = 4 * heads / (width * tp), 4 * 2 / (width * sp)
    between = 10 / sp + 24 / tp
    published = {
        "none": (GPT2, MemorySection(), between + attention + statistics),
        "fused": (FUSED, MemorySection(), between + log_sum_exp + statistics),
        "selective": (GPT2, CORE, between - 2 / tp + statistics),
        "full": (GPT2, FULL, 2 / sp),
    }
    cases = [(model, memory, MIDDLE) for model, memory, _ in published.values()]
    kept = _equal_on_all_ranks(run_grid(_measure_all, Grid(tp=tp), cases, is_cut))
    for (name, (_, _, wanted)), total in zip(published.items(), kept, strict=True):
        assert total / LAYERS / (S * B * width) == pytest.approx(wanted, rel=0.002), name


# torch's hooks do not see the places of experts' rows, 4% here
UNSEEN = {"nemotron_h-experts": 0.05}
UNEVEN = {
    **{name: MODELS[name] for name in ("qwen3_next", "nemotron_h", "uneven", "gemma3", "llama4")},
    "nemotron_h-experts": plain_models.make_model(
        "nemotron_h",
        **SIZES,
        num_kv_heads=2,
        attention={
            "layer_types": (
                "mamba2",
                "experts",
                "no_positions",
                "feed_forward",
                "experts",
                "mamba2",
            )
        },
        linear_attention=STATES,
        moe={"num_experts": 4, "intermediate_size": 32, "shared_expert_intermediate_size": 48},
    ),
}
CUTS = ((3, 1, 2), (1, 4, 1), (2, 3, 1))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", UNEVEN)
def test_plan_predicts_stages_of_blocks_that_differ(name):
    """Each stage has blocks of its own kinds, in numbers of its own: a mean over the model would miss."""
    model, memories = UNEVEN[name], (MemorySection(), CORE, ALL, FULL)
    stages = [stage for cut in CUTS for stage in make_stages(cut)[1:]]
    cases = [(model, memory, stage) for memory in memories for stage in stages]
    (kept,) = run_grid(_measure_all, Grid(), cases, False)
    planned = [_planned(model, ParallelSection(), memory, stage) for _, memory, stage in cases]
    assert kept == pytest.approx(planned, rel=UNSEEN.get(name, 0.002))
    assert len(set(kept[: len(stages)])) > 3, "stages keep different amounts"


@pytest.mark.sample(3)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", [pytest.param(n, marks=WIDE if n in SLOW else ()) for n in MODELS])
def test_plan_predicts_stages(name, tp):
    model, is_cut = MODELS[name], tp > 1
    memories = MemorySection(), CORE, ALL, FULL, PAIRS
    cases = [(model, memory, stage) for memory in memories for stage in STAGES]
    parallel = ParallelSection(tp=tp, sequence_parallel=is_cut)
    for kept in run_grid(_measure_all, Grid(tp=tp), cases, is_cut):
        for (_, memory, stage), total in zip(cases, kept, strict=True):
            wanted = _planned(model, parallel, memory, stage)
            assert total == pytest.approx(wanted, rel=0.01), (memory, stage)


def _measure_all(env, cases, is_cut):
    return [_measure(env, model, memory, stage, is_cut) for model, memory, stage in cases]


def _measure_cp(env, cases, method, inner):
    """Bytes that a context-parallel rank keeps of one micro-batch in bf16, in a middle stage."""
    return [_measure_middle(env, model, method, inner, memory) for model, memory in cases]


def _measure_middle(env, model, method, inner, memory):
    parallel = ParallelSection(
        cp=env.groups.cp.size, cp_method=method, hierarchical_cp_size=max(inner, 2)
    )
    context = make_context(env.groups, parallel, CommLog())
    module = StageModule(
        model,
        MIDDLE,
        sp=SequenceParallel(tp=env.groups.tp, is_sequence_parallel=False),
        dtype=torch.bfloat16,
        device=CPU,
        seed=1,
        context=context,
    )
    module.recompute(memory)
    positions = held_positions(((S,),), context)
    held = positions.shape[1]
    tokens, mask = torch.zeros(B, held, dtype=torch.int64), torch.ones(B, held)
    hidden = torch.randn(held, B, model.hidden_size).bfloat16().requires_grad_()
    known = [*module.parameters(), *module.buffers(), tokens, mask, positions]
    with SavedBytes(known) as kept:
        module(tokens, tokens, mask, hidden, torch.arange(B), Rows(positions, ((S,),)))
    return kept.total


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "inner"), [("ring", 1), ("all_gather", 1), ("all_to_all", 4), ("hybrid", 2)]
)
def test_plan_predicts_a_context_parallel_rank(method, inner):
    names = ("gpt2", "llama", "qwen3", "mla", "olmo2", "qwen3_next")
    memories = (MemorySection(), CORE, ALL, FULL)
    cases = [(MODELS[name], memory) for name in names for memory in memories]
    parallel = ParallelSection(cp=4, cp_method=method, hierarchical_cp_size=max(inner, 2))
    totals = run_grid(_measure_cp, Grid(cp=4), cases, method, inner, hierarchical_cp_size=inner)
    for (model, memory), total in zip(cases, _equal_on_all_ranks(totals), strict=True):
        wanted = _planned(model, parallel, memory, MIDDLE)
        assert total == pytest.approx(wanted, rel=0.01), (model, memory)


def test_rerun_holds_the_blocks_that_run_together():
    shape = ActivationShape(
        model=FUSED, parallel=ParallelSection(), memory=PAIRS, seq_len=S, micro_batch_size=B,
        dtype="bfloat16",
    )  # fmt: skip
    planned = stage_activations(shape, MIDDLE)
    assert planned.rerun_bytes == 2 * layer_bytes(shape)
    work = one_f_one_b(Sizes(pp=3, num_micro_batches=8))[0]
    assert peak_bytes(work, [planned]) == 3 * shape.stream_bytes + planned.rerun_bytes
