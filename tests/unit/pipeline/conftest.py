"""A rank that is a whole pipeline, whose groups have one rank so that nothing can be sent; and one
in the middle of three."""

from dataclasses import fields

import pytest
import torch

from raymega.parallel.comm.process_groups import Group, Groups
from raymega.pipeline.p2p import PointToPoint
from raymega.schedule.stage_placement import Placement

NAMES = [field.name for field in fields(Groups)]


def make_p2p(placement, rank):
    groups = {
        name: Group(
            name=name, ranks=tuple(range(placement.pp)), index=rank, timeout_s=1.0, handle=None
        )
        for name in NAMES
    }
    return PointToPoint(
        Groups(**groups),
        placement=placement,
        shape=(1, 2, 3),
        dtype=torch.float64,
        device=torch.device("cpu"),
        timeout_s=1.0,
    )


@pytest.fixture
def alone():
    return make_p2p(Placement(pp=1), 0)


@pytest.fixture
def middle():
    return make_p2p(Placement(pp=3, chunks=2), 1)
