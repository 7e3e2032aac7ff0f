"""A stage that is a whole pipeline: its groups have one rank, so nothing can be sent."""

import pytest
import torch

from raymega.parallel.groups import Group, Groups
from raymega.pipeline.p2p import PointToPoint


@pytest.fixture
def alone():
    group = Group(name="alone", ranks=(0,), index=0, timeout_s=1.0, handle=None)
    names = ("world", "tp", "dp", "pp_forward", "pp_backward", "model", "embedding")
    return PointToPoint(
        Groups(**dict.fromkeys(names, group)),
        shape=(1, 2, 3),
        dtype=torch.float64,
        device=torch.device("cpu"),
        timeout_s=1.0,
    )
