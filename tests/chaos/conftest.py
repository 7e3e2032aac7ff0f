import pytest

from raymega.chaos.sandbox import sandbox
from tests.support.drills import Drills


@pytest.fixture(scope="session")
def drills(tmp_path_factory):
    """Drills on one cluster of nodes with one slot each."""
    with sandbox(num_nodes=2, cpus_per_node=1) as box:
        yield Drills(box, tmp_path_factory.mktemp("drills"))
