"""WeightBuffer on one rank: parameters become views, and weights that are old are refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from raymega.errors import InternalError
from raymega.parallel.data_parallel.param_buffer import WeightBuffer
from raymega.plan.zero_levels import ZeroLevel
from tests.support.params import ALONE, make_param, make_table, make_tensor

PAIR = replace(ALONE.dp, ranks=(0, 1))
TWO = replace(ALONE, replicas=PAIR, sharers=PAIR)


def _params():
    return [make_param(make_tensor(name, shape)) for name, shape in (("a", (2, 3)), ("b", (5,)))]


def test_parameters_become_views_and_keep_values_and_identity():
    params = _params()
    before = [param.detach().clone() for param in params]
    table = make_table([params])
    buffer = WeightBuffer(table)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    buffer.owned(table.buckets[0]).fill_(3.0)
    assert all((param == 3.0).all() and param.requires_grad for param in params)


def test_old_weights_are_refused_until_a_gather_was_started():
    module = nn.Module()
    module.weight = _params()[0]
    buffer = WeightBuffer(make_table([[module.weight]], TWO, level=ZeroLevel.OPTIMIZER))
    buffer.wait_for(module)
    buffer.mark_updated()
    with pytest.raises(InternalError, match="call start_gather"):
        buffer.wait_for(module)


def test_without_sharding_nothing_is_ever_old():
    module = nn.Module()
    module.weight = _params()[0]
    buffer = WeightBuffer(make_table([[module.weight]], TWO))
    buffer.mark_updated()
    buffer.wait_for(module)
