"""Rows of experts that are padded to their capacity: known without a message."""

from types import SimpleNamespace

import torch

from raymega.parallel.expert_parallel.dispatcher import Routing, _even_parts, _even_table

CPU = torch.device("cpu")


def test_padded_rows_are_as_many_as_the_tables_of_all_ranks_say():
    groups = SimpleNamespace(ep=SimpleNamespace(size=4), etp=SimpleNamespace(size=2))
    none = torch.empty(0)
    routing = Routing(experts=none, weights=none, num_experts=8, capacity=3)
    parts, table = _even_parts(routing, groups), _even_table(routing, groups, CPU)
    # by the rank of etp, by that of ep, and by the own experts
    by_rank = table.view(2, 4, 2).sum(2)
    assert parts.received == by_rank[0].tolist() == parts.sent == [6] * 4
    assert parts.of_etp == by_rank.sum(1).tolist() == [24, 24]
