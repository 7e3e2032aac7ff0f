"""What a rank's model is built with: which ranks share the gradients and the state of which weights."""

from dataclasses import replace

import torch

from raymega.train.build import build_parts
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.params import ALONE


def test_experts_share_their_state_with_the_replicas_of_experts_alone():
    """Under hybrid sharding both have copies, which are other ranks for experts than for all else."""
    names = ("replicas", "sharers", "copies", "edp", "expert_sharers", "expert_copies")
    ranks = {
        name: replace(getattr(ALONE, name), ranks=(0, 10 + number), name=name)
        for number, name in enumerate(names)
    }
    plan = make_test_plan(
        *layout_overrides("tp1"), "model.moe.num_experts=4", "parallel.sharding=optimizer"
    )
    parts = build_parts(plan, rank=0, groups=replace(ALONE, **ranks), device=torch.device("cpu"))
    kinds = set()
    for bucket in parts.optimizer._table.buckets:
        kinds.add(bucket.is_expert)
        sharing = bucket.sharing
        found = [group.name for group in (sharing.whole, sharing.inside, sharing.across)]
        assert found == list(names[3:] if bucket.is_expert else names[:3])
        assert all(
            (".experts." in span.param.spec.name) == bucket.is_expert for span in bucket.spans
        )
    assert kinds == {True, False}
