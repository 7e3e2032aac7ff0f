"""Whole runs with context parallelism: the same run as one rank, by every method and beside every axis."""

from functools import cache

import pytest

from tests.support.jobs import layout_overrides
from tests.support.training import assert_same_run, train

pytestmark = pytest.mark.dist

LLAMA: tuple[str, ...] = ()
GPT2 = ("model.family=gpt2", "model.num_kv_heads=num_heads")
KV2 = ("model.num_kv_heads=2",)
DROPOUT = ("model.hidden_dropout=0.1",)
WEIGHTS = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
SHARDED = ("parallel.sharding=optimizer",)
HYBRID = ("parallel.cp_method=hybrid",)
EXCHANGE = ("parallel.cp_method=all_to_all",)
GATHER = ("parallel.cp_method=all_gather",)
CASES = [
    (LLAMA, "cp2", ()),
    (GPT2, "cp2", GATHER),
    (LLAMA, "cp2", EXCHANGE),
    (KV2, "cp4", HYBRID),
    (KV2, "cp4", EXCHANGE),
    (GPT2, "tp2-cp2-sp", ()),
    (LLAMA, "tp2-cp2-pp2-sp", EXCHANGE),
    (GPT2, "cp2-pp2-dp2", SHARDED),
    (LLAMA, "cp4-dp2", SHARDED + GATHER),
    (DROPOUT, "tp2-cp2-pp2-sp", ()),
    (WEIGHTS, "tp2-cp2-sp", EXCHANGE),
    (DROPOUT, "cp2-pp2", ("schedule.name=zb_v", "schedule.chunks=2", *GATHER)),
    (KV2, "cp2-pp2", ("schedule.chunks=2", "memory.recompute=full")),
    (KV2, "cp4", (*HYBRID, "memory.recompute=selective")),
    (LLAMA, "cp2-dp2", ("parallel.order=dp-tp-pp-cp-ep", *EXCHANGE)),
]


@cache
def _reference(model):
    return train([*model, *layout_overrides("tp1")])


@pytest.mark.sample(1)
@pytest.mark.parametrize("model, layout, options", CASES)
def test_layout_with_cp_trains_the_same_run(model, layout, options):
    assert_same_run([*model, *layout_overrides(layout), *options], _reference(model))
