"""Planted mistakes: state, gradients and weights that ranks share out."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import EXPERTS, Mutation

SHARDING: tuple[Mutation, ...] = (
    Mutation(
        name="sharded update leaves out the last element of each part",
        file="parallel/core/buckets.py",
        old="begin=size * inside.index, end=size * (inside.index + 1))",
        new="begin=size * inside.index, end=size * (inside.index + 1) - 1)",
        layout=Layout(dp=2, sharding="optimizer"),
    ),
    Mutation(
        name="updated weights are not gathered",
        file="parallel/data_parallel/param_buffer.py",
        old="        if not self._is_old:\n            return\n",
        new="        self._is_old = False\n        if not self._is_old:\n            return\n",
        layout=Layout(dp=2, sharding="optimizer"),
    ),
    Mutation(
        name="weights gathered before the update are used after it",
        file="parallel/data_parallel/param_buffer.py",
        old="        self._free(keep=())\n",
        new="",
        layout=Layout(dp=2, sharding="parameters"),
    ),
    Mutation(
        name="weights are not gathered again for backward",
        file="parallel/data_parallel/param_buffer.py",
        old="            _drop(self._flats[index])\n            self._whole.remove(index)\n",
        new="            self._flats[index].zero_()\n",
        layout=Layout(dp=2, sharding="parameters"),
    ),
    Mutation(
        name="a micro-batch's part of sharded gradients is added twice",
        file="parallel/data_parallel/grad_buffer.py",
        old="            self.owned(bucket).add_(mine)\n",
        new="            self.owned(bucket).add_(mine, alpha=2)\n",
        layout=Layout(dp=2, sharding="gradients"),
    ),
    Mutation(
        name="a micro-batch's part of sharded gradients takes the place of the sum",
        file="parallel/data_parallel/grad_buffer.py",
        old="            self._without_any.remove(bucket.index)\n",
        new="",
        layout=Layout(dp=2, sharding="gradients"),
    ),
    Mutation(
        name="gradients are not summed over the copies of hybrid sharding",
        file="parallel/data_parallel/grad_buffer.py",
        old="if bucket.level > ZeroLevel.NONE and across.size > 1:",
        new="if False:",
        layout=Layout(dp=4, sharding="optimizer", data_parallel_shard_degree=2),
    ),
    Mutation(
        name="norm counts the same part of every copy",
        file="parallel/core/buckets.py",
        old="        begin += size * sharing.across.index\n",
        new="",
        layout=Layout(dp=4, sharding="gradients", data_parallel_shard_degree=2),
    ),
    Mutation(
        name="experts are summed over the copies of dense weights",
        file="train/build_model.py",
        old="across=groups.expert_copies",
        new="across=groups.copies",
        layout=Layout(
            dp=4, ep=2, sharding="optimizer", data_parallel_shard_degree=2, micro_batch_size=2
        ),
        job=EXPERTS,
    ),
    Mutation(
        name="experts are sharded among the neighbours of dense weights",
        file="train/build_model.py",
        old="inside=groups.expert_sharers,",
        new="inside=groups.sharers,",
        layout=Layout(
            dp=4, ep=2, sharding="optimizer", data_parallel_shard_degree=2, micro_batch_size=2
        ),
        job=EXPERTS,
    ),
)
