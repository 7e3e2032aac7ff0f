"""Any layout to any other, of whole jobs: built as workers build them, rank by rank in one process.

What can differ is what `raymega verify` draws: its axes and options join by themselves.
"""

import functools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymega.checkpoint.load.reader import load
from raymega.config.schema import Job
from raymega.parallel.comm import process_groups
from raymega.plan.memory.optimizer_state import KINDS, saved_kinds
from raymega.plan.run_plan import make_plan
from raymega.plan.tensor_table import model_tensors
from raymega.plan.zero_levels import data_parallel_shard_size
from raymega.train.build import build_parts
from raymega.verify.layout import DEGREES, OPTIONS, Layout
from raymega.verify.layout_sampling import features
from raymega.verify.legal_layouts import is_legal, legal_shapes, with_layout
from tests.support.jobs import make_test_plan
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.support import assemble_shards, known_values, save_rank

NUM_PAIRS, MAX_RANKS = 40, 8
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")
DTYPES = ("bfloat16", "float32", "float64")
"""From few digits to many: values may widen on the way."""
EXPERTS = {
    0: (),
    4: (
        "model.moe.num_experts=4", "model.moe.intermediate_size=8", "model.moe.layer_freq=2", "model.moe.expert_bias=true",
        "model.moe.load_balancing_type=global", "model.moe.router_aux_loss_coef=0.1",
    ),
}  # fmt: skip
"""In every other block, with state of routers: a bias, and the last step's load."""
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What both sides have in common."""

    family: str
    is_tied: bool
    optimizer: str
    state_dtype: str
    num_experts: int


@functools.cache
def make_job(kind: Kind) -> Job:
    heads = "num_heads" if kind.family == "gpt2" else 2
    return make_test_plan(
        f"model.family={kind.family}", f"model.tie_word_embeddings={str(kind.is_tied).lower()}",
        f"model.num_kv_heads={heads}", f"optimizer.name={kind.optimizer}", "model.hidden_size=16",
        f"optimizer.state_dtype={kind.state_dtype}",
        "model.ffn_hidden_size=24", "model.vocab_size=70", "model.make_vocab_size_divisible_by=24", "model.num_layers=6",
        "model.num_heads=4", "run.eval_samples=0", "parallel.pp=1", *EXPERTS[kind.num_experts],
    ).job  # fmt: skip


@functools.cache
def shapes_of(kind: Kind) -> list[Layout]:
    return [Layout(), *legal_shapes(make_job(kind), MAX_RANKS)]


@st.composite
def layouts(draw, kind):
    """A legal layout; every option of verify's table takes part where it matters."""
    job, layout = make_job(kind), draw(st.sampled_from(shapes_of(kind)))
    for option in OPTIONS:
        values = (*option.values, *option.others(job, layout))
        candidate = layout.with_value(option.name, draw(st.sampled_from(values)))
        if option.matters(layout) and is_legal(job, candidate):
            layout = candidate
    return layout


@st.composite
def pairs(draw, family):
    kind = draw(
        st.builds(
            Kind,
            family=st.just(family),
            is_tied=st.booleans(),
            optimizer=st.sampled_from(sorted(KINDS)),
            state_dtype=st.sampled_from(("master", "bfloat16", "8bit")),
            num_experts=st.sampled_from(sorted(EXPERTS)),
        )
    )
    first = draw(st.sampled_from(range(len(DTYPES))))
    second = draw(st.sampled_from(range(first, len(DTYPES))))
    saved, loaded = draw(layouts(kind)), draw(layouts(kind))
    return kind, (saved, DTYPES[first]), (loaded, DTYPES[second])


@pytest.fixture(scope="module", autouse=True)
def no_torch_groups():
    """Groups know their ranks and send nothing, so that any rank can be built here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_groups, "_new_handle", lambda *_, **__: None)
        patch.setattr(process_groups, "_wait_for_all", lambda *_: None)
        yield


def ranks_of(kind, side):
    """Each rank's parts, on one layout and in one number format."""
    layout, dtype = side
    values = with_layout(make_job(kind), layout).model_dump()
    values["precision"]["dtype"] = dtype
    plan = make_plan(Job.model_validate(values))
    for rank in range(plan.grid.world_size):
        own = process_groups.build_groups(
            plan.grid, rank, timeout_s=1.0, sharers=data_parallel_shard_size(plan.job.parallel)
        )
        yield rank, build_parts(plan, rank=rank, groups=own, device=CPU)


def save(store, kind, side):
    shards, grid = [], None
    for rank, parts in ranks_of(kind, side):
        grid = parts.plan.grid
        blocks = list(parts.optimizer.blocks())
        for block in blocks:
            block.values.copy_(known_values(block))
        shards.append(save_rank(store, blocks, rank=rank))
    return assemble_shards(shards, grid)


def check(kind, saved, loaded):
    """Bit for bit, every tensor of the model and of the optimizer, on every rank."""
    store = MemoryStore()
    manifest = save(store, kind, saved)
    job = make_job(kind)
    expected = {
        f"{at}/{tensor.name}"
        for tensor in model_tensors(job.model)
        for at in ("model", *(saved_kinds(job.optimizer, tensor.role) if tensor.is_trained else ()))
    }
    assert manifest.tensors().keys() == expected
    for rank, parts in ranks_of(kind, loaded):
        blocks = list(parts.optimizer.blocks())
        for block in blocks:
            block.values.fill_(0 if block.values.dtype == torch.uint8 else torch.nan)
        load(store, manifest, blocks, expected=expected)
        for block in blocks:
            assert torch.equal(block.values, known_values(block)), (rank, block.name)


@pytest.mark.wide
@pytest.mark.slow
def test_forty_drawn_pairs_of_layouts_keep_every_bit():
    met = set()

    for family in FAMILIES:

        @settings(
            max_examples=(NUM_PAIRS + 24) // len(FAMILIES), deadline=None, derandomize=True,
            database=None, suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(pairs(family))
        def draw_and_check(pair):
            met.add(pair)
            check(*pair)

        draw_and_check()
    assert len(met) >= NUM_PAIRS
    sides = [side for _, *both in met for side in both]
    assert {dtype for _, dtype in sides} == set(DTYPES)
    seen = set().union(*(features(layout) for layout, _ in sides))
    legal = {
        axis for axis in DEGREES for at in shapes_of(next(iter(met))[0]) if at.degree(axis) > 1
    }
    assert {axis for name, axis, *_ in seen if name == "axis"} == legal
    for option in OPTIONS:
        if option.name in ("sharding", "sequence_parallel", "chunks", "ep", "etp"):
            values = {value for name, value, *_ in seen if name == option.name}
            assert len(values) > 1, option.name
