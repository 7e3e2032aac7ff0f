"""Sharded parameters for tests, from a name and a shape."""

import torch

from raymega.parallel.parameter import ShardedParameter, initialise
from raymega.parallel.sharding import make_spec
from raymega.plan.tensors import GlobalTensor


def make_tensor(name, shape, *, tp_dim=-1, has_decay=True):
    """A global tensor that starts as standard normal numbers."""
    return GlobalTensor(
        name=name, shape=shape, tp_dim=tp_dim, init="normal", init_std=1.0, has_decay=has_decay
    )


def make_param(tensor, *, tp=1, tp_rank=0, dtype=torch.float64, seed=7, **ties):
    """The parameter of one tp rank, with its first values."""
    spec = make_spec((tensor,), tp=tp, tp_rank=tp_rank, **ties)
    param = ShardedParameter(torch.empty(spec.shape, dtype=dtype), spec)
    initialise(param, seed)
    return param
