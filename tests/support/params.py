"""Sharded parameters for tests, from a name and a shape, and the buffers that they live in."""

import torch

from raymega.config.schema import ModelSection
from raymega.optim.optimizer import Optimizer
from raymega.parallel.comm.process_groups import build_groups
from raymega.parallel.core.buckets import Sharing, make_buckets
from raymega.parallel.core.shard_spec import make_spec
from raymega.parallel.core.sharded_parameter import ShardedParameter, initialise
from raymega.parallel.data_parallel.grad_buffer import GradBuffer
from raymega.parallel.data_parallel.param_buffer import WeightBuffer
from raymega.plan.grid import Grid
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.zero_levels import BUCKET_BYTES, ZeroLevel

MODEL = ModelSection(
    family="llama", num_layers=2, hidden_size=8, num_heads=2, ffn_hidden_size=8, vocab_size=8
)
"""Model whose depth learning rates and first values depend on."""
ALONE = build_groups(Grid(), 0, timeout_s=1.0)


def make_tensor(name, shape, *, tp_dim=-1, role="matrix"):
    """A global tensor that starts as standard normal numbers."""
    return GlobalTensor(
        name=name, shape=shape, tp_dim=tp_dim, init="normal", initializer_range=1.0, role=role
    )


def make_param(tensor, *, tp=1, tp_rank=0, dtype=torch.float64, seed=7, **ties):
    """The parameter of one tp rank, with its first values."""
    spec = make_spec((tensor,), tp=tp, tp_rank=tp_rank, **ties)
    param = ShardedParameter(torch.empty(spec.shape, dtype=dtype), spec)
    initialise(param, seed)
    return param


def sharing_of(groups):
    """Return how a rank's replicas share their state."""
    return Sharing(whole=groups.replicas, inside=groups.sharers, across=groups.copies)


def make_table(chunks, groups=ALONE, *, level=ZeroLevel.NONE, bucket_bytes=BUCKET_BYTES):
    """The buckets of a rank with these model chunks, each parameter a unit of its own."""
    experts = Sharing(whole=groups.edp, inside=groups.expert_sharers, across=groups.expert_copies)
    return make_buckets(
        chunks, sharing_of(groups), experts=experts, level=level, bucket_bytes=bucket_bytes
    )


def make_buffer(params, groups=ALONE, *, level=ZeroLevel.NONE, bucket_bytes=BUCKET_BYTES):
    """A gradient buffer of one model chunk."""
    return GradBuffer(make_table([params], groups, level=level, bucket_bytes=bucket_bytes), groups)


def make_optimizer(
    params, section, groups=ALONE, *, level=ZeroLevel.NONE, bucket_bytes=BUCKET_BYTES, **options
):
    """Gradients, weights and the optimizer of one model chunk."""
    table = make_table([params], groups, level=level, bucket_bytes=bucket_bytes)
    gradients, weights = GradBuffer(table, groups), WeightBuffer(table)
    optimizer = Optimizer(table, gradients, weights, section, MODEL, groups, **options)
    return gradients, weights, optimizer
