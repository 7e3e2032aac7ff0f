"""Set before torch and ray are imported, for every test and the processes that it starts."""

import os

# One thread per process, as several ranks share few cores.
os.environ["OMP_NUM_THREADS"] = "1"
# A token that some Ray once left in the home folder must not decide how test clusters talk.
os.environ["RAY_AUTH_MODE"] = "disabled"

import pytest  # after the environment is set
from hypothesis import settings

# A deadline per example measures how busy the machine is.
settings.register_profile("raymega", deadline=None)
settings.load_profile("raymega")


TOGETHER = ("tests/ray", "tests/s3", "tests/cluster")
"""Folders whose tests share clusters and servers, or are about seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the tests out, each folder of TOGETHER stays in one."""
    for item in items:
        for folder in TOGETHER:
            if item.nodeid.startswith(folder):
                item.add_marker(pytest.mark.xdist_group(folder))
