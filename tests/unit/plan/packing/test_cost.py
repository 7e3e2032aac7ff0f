"""The cost of a pack, against sums done by hand."""

from __future__ import annotations

import pytest

from raymega.config.schema import ModelSection
from raymega.plan.flops import flops_per_token
from raymega.plan.hardware.lookup import ROUND_H100
from raymega.plan.packing.cost import PackCost, make_pack_cost, pairs_in, pairs_of

COST = PackCost(
    token_s=3.0, pair_s=2.0, near_s=5.0, far_s=50.0, hop_s=7.0, start_s=11.0, ranks_per_node=4
)
MODEL = ModelSection(
    family="llama",
    num_layers=12,
    hidden_size=2048,
    num_heads=16,
    ffn_hidden_size=8192,
    vocab_size=32768,
)


def test_pairs_are_those_below_the_diagonal() -> None:
    assert pairs_of(4) == 1 + 2 + 3 + 4
    assert pairs_in([4, 1]) == 11


def test_one_rank_sends_nothing() -> None:
    assert COST.seconds(tokens=10, pairs=6, size=1) == 11 + 30 + 12


def test_transfers_that_attention_does_not_hide_count() -> None:
    # Each rank has 32 / 2 pairs in two blocks of 16 s; a hop takes 7 + 5 * 10.
    assert COST.seconds(tokens=10, pairs=32, size=2) == 11 + 30 + 16 + 57
    # Blocks of 100 s hide it.
    assert COST.seconds(tokens=10, pairs=200, size=2) == 11 + 30 + 100 + 100


def test_groups_that_leave_the_node_pay_for_the_network() -> None:
    near = COST.seconds(tokens=10, pairs=0, size=4)
    far = COST.seconds(tokens=10, pairs=0, size=8)
    assert near == 11 + 30 + 3 * 57
    assert far == 11 + 30 + 7 * (7 + 500)


def test_attention_is_shared_out_evenly() -> None:
    free = PackCost(token_s=0.0, pair_s=1.0)
    for size in (1, 2, 4, 8):
        assert free.seconds(tokens=1, pairs=64, size=size) == pytest.approx(64 / size)


def test_linear_seconds_are_the_models_flops_without_attention() -> None:
    cost = make_pack_cost(MODEL, ROUND_H100, layers=12)
    flops = flops_per_token(MODEL, seq_len=0)
    assert cost.token_s == pytest.approx(flops / (989e12 * 0.6))


def test_tensor_parallel_ranks_share_the_work() -> None:
    one = make_pack_cost(MODEL, ROUND_H100, layers=12)
    four = make_pack_cost(MODEL, ROUND_H100, layers=12, tp=4)
    assert four.token_s == pytest.approx(one.token_s / 4)
    assert four.pair_s == pytest.approx(one.pair_s / 4)
    assert four.near_s == pytest.approx(one.near_s / 4)
    assert four.ranks_per_node == 2
