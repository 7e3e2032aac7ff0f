"""Packed documents: what they compute is what they compute alone, and every layout trains the same run."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.config.schema import ModelSection
from raymega.data.rows import positions_of
from raymega.parallel.context_parallel.context import Rows
from tests.support.jobs import layout_overrides
from tests.support.ranks import RankFailureError
from tests.support.training import assert_same_run, train
from tests.unit.model.parts import make_stage_modules

pytestmark = pytest.mark.dist

LIMIT = 1e-12
SIZES = {
    "num_layers": 2, "hidden_size": 16, "num_heads": 4, "ffn_hidden_size": 24, "vocab_size": 50,
    "max_positions": 64,
}  # fmt: skip
LINEAR = {"layer_types": ("gated_delta_net", "full")}
STATES = {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 6, "value_head_dim": 5}
MAMBA = {"layer_types": ("mamba2", "feed_forward")}
MODELS = {
    "llama": ModelSection(family="llama", num_kv_heads=2, **SIZES),
    "gpt2": ModelSection(family="gpt2", **SIZES),
    "qwen3": ModelSection(family="qwen3", num_kv_heads=1, **SIZES),
    "qwen3_next": ModelSection.model_validate(
        {
            "family": "qwen3_next",
            "num_kv_heads": 2,
            "attention": LINEAR,
            "linear_attention": STATES,
            **SIZES,
        }
    ),
}
MODELS["nemotron_h"] = ModelSection.model_validate(
    {"family": "nemotron_h", "num_kv_heads": 2, "attention": MAMBA, "linear_attention": STATES, **SIZES}
)  # fmt: skip
PACKED = ("data.packing=best_fit", "data.packing_window=64", "data.document_multiple=8")
UNPADDED = (*PACKED[:2], "data.document_multiple=1")
GPT2 = ("model.family=gpt2", "model.num_kv_heads=num_heads")
DROPOUT = ("model.hidden_dropout=0.1",)
SHARDED = ("parallel.sharding=optimizer",)
ROUTED = (
    "model.moe.num_experts=4", "model.moe.intermediate_size=16", "model.moe.load_balancing_type=global",
    "model.moe.router_aux_loss_coef=0.1", "model.moe.router_jitter_noise=0.1",
)  # fmt: skip
DYNAMIC = ("parallel.dynamic_cp=true", "schedule.micro_batch_size=1")
NEXT = (
    "model.family=qwen3_next", "model.attention={layer_types: [gated_delta_net, full]}",
    "model.linear_attention={num_key_heads: 4, num_value_heads: 8, key_head_dim: 6, value_head_dim: 5}",
)  # fmt: skip
CASES = [
    ((*UNPADDED, *NEXT), "cp2-dp2", (*DYNAMIC, *SHARDED)),
    ((*PACKED, *NEXT), "cp4-pp2", ("parallel.cp_method=hybrid", "memory.recompute=selective")),
    (UNPADDED, "dp2", ()),
    (UNPADDED, "tp2-pp2-dp2-sp", SHARDED),
    (PACKED, "cp2", ()),
    (PACKED, "cp4", ("parallel.cp_method=all_gather",)),
    (PACKED, "cp4", ("parallel.cp_method=hybrid",)),
    ((*PACKED, *DROPOUT), "tp2-cp2-pp2-sp", ("parallel.cp_method=all_to_all",)),
    ((*PACKED, *DROPOUT), "cp2-dp2-pp2", ("schedule.chunks=2", *SHARDED)),
    ((*PACKED, *GPT2), "tp2-cp2-sp", ("memory.recompute=full",)),
    ((*PACKED, *GPT2), "cp2-pp2", ("schedule.name=zb_v", "schedule.chunks=2")),
    (PACKED, "cp2-dp3", ("memory.recompute=selective",)),
    (UNPADDED, "dp2", DYNAMIC),
    (UNPADDED, "cp4", DYNAMIC),
    ((*UNPADDED, *DROPOUT), "cp2-dp2-pp2", (*DYNAMIC, *SHARDED, "schedule.chunks=2")),
    (PACKED, "tp2-cp2-dp2-sp", (*DYNAMIC, "parallel.cp_method=all_gather")),
    ((*PACKED, *GPT2), "cp2-dp4", (*DYNAMIC, "memory.recompute=full")),
    (UNPADDED, "dp4-pp2", (*DYNAMIC, "schedule.name=zb_h1", "parallel.order=dp-pp-cp-tp-ep")),
    ((*UNPADDED, *ROUTED), "tp2-dp2-ep4", DYNAMIC),
]


def _draw(seed, num_rows, seq_len):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(SIZES["vocab_size"], (2, num_rows, seq_len), generator=generator)
    mask = torch.rand(num_rows, seq_len, generator=generator) < 0.8
    return numbers[0], numbers[1], mask.double()


def _loss_and_gradients(model, batches):
    (module,) = make_stage_modules(model)
    loss = sum(
        module(tokens, labels, mask, None, rows=rows) for tokens, labels, mask, rows in batches
    )
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters()}


def _rows(documents):
    positions = [torch.from_numpy(positions_of(lengths)) for lengths in documents]
    return Rows(torch.stack(positions), documents)


def _alone(tensors, documents):
    """Each document as a micro-batch of its own."""
    for index, lengths in enumerate(documents):
        at = 0
        for length in lengths:
            yield *(t[index : index + 1, at : at + length] for t in tensors), None
            at += length


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from(sorted(MODELS)),
    st.lists(st.integers(1, 31), min_size=0, max_size=5, unique=True),
    st.lists(st.integers(1, 31), min_size=0, max_size=5, unique=True),
)
def test_packed_rows_give_what_their_documents_give_alone(name, first, second):
    cuts = first, second
    edges = [[0, *sorted(row), 32] for row in cuts]
    documents = tuple(tuple(b - a for a, b in pairwise(row)) for row in edges)
    tensors = _draw(len(first), len(documents), 32)
    loss, gradients = _loss_and_gradients(MODELS[name], [(*tensors, _rows(documents))])
    wanted, by_name = _loss_and_gradients(MODELS[name], list(_alone(tensors, documents)))
    assert abs(loss - wanted) <= LIMIT * abs(wanted)
    for parameter, gradient in by_name.items():
        scale = max(1.0, float(gradient.abs().max()))
        difference = float((gradients[parameter] - gradient).abs().max())
        assert difference <= LIMIT * scale, parameter


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "nemotron_h"])
def test_a_document_does_not_see_the_one_before(name):
    tensors = _draw(0, 1, 32)
    changed = (tensors[0].clone(), *tensors[1:])
    changed[0][0, :11] = (changed[0][0, :11] + 1) % SIZES["vocab_size"]
    only_second = (torch.arange(32) >= 11).double()[None]
    losses = [
        _loss_and_gradients(MODELS[name], [(tokens, labels, only_second, _rows(((11, 21),)))])[0]
        for tokens, labels, _ in (tensors, changed)
    ]
    assert losses[0] == losses[1]


@cache
def _reference(job):
    return train([*job, *layout_overrides("tp1")])


@pytest.mark.sample(1)
@pytest.mark.parametrize("job, layout, options", CASES)
def test_layout_trains_the_same_packed_run(job, layout, options):
    assert_same_run([*job, *layout_overrides(layout), *options], _reference(job))


@pytest.mark.parametrize("layout", ["tp1", "cp2-dp2"])
def test_step_without_a_label_is_refused_by_name(layout):
    """The first row that seed 2 draws is a document of one token and padding."""
    rows = ("data.packing=best_fit", "data.packing_window=64", "data.seq_len=4")
    lone = ("data.document_multiple=4", "data.global_batch_size=1", "schedule.micro_batch_size=1")
    with pytest.raises(RankFailureError, match="step 1 reads no token with a label that counts"):
        train([*rows, *lone, "run.seed=2", *layout_overrides(layout)], steps=1)
