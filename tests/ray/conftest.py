import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from ray._private import services

from raymega.session import close_session, open_session
from tests.support.local_ray import clear_away

FOLDER = Path(__file__).parent
NODE_START_S = 300.0
"""Longest wait for a node of Ray to join its cluster."""


def pytest_collection_modifyitems(items):
    """Tests on the one local Ray come first among those of this folder, so that it is started once."""
    mine = [place for place, item in enumerate(items) if FOLDER in item.path.parents]
    ordered = sorted((items[place] for place in mine), key=_needs_another_ray)
    for place, item in zip(mine, ordered, strict=True):
        items[place] = item


def _needs_another_ray(item):
    return "local_ray" not in item.fixturenames


@pytest.fixture(autouse=True, scope="session")
def _patient_nodes():
    """Wait for a node of a test's cluster as long as it takes to start.

    Ray gives up after 30 s, which a busy machine exceeds; a node left behind by another try would be one more.
    """
    real = services.get_node

    def get_node(*args):
        deadline_s = time.monotonic() + NODE_START_S
        while True:
            try:
                return real(*args)
            except RuntimeError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "get_node", get_node)
        yield


@pytest.fixture(scope="package")
def _local_ray():
    yield open_session("local", num_cpus=4)
    close_session()


@pytest.fixture(scope="module")
def local_ray(_local_ray):
    """The one private Ray of this folder, to which this process is connected; nothing is at work on it."""
    return _local_ray


@pytest.fixture(autouse=True, scope="module")
def _no_session_of_others(request):
    """A module that does not use the local Ray begins without a connection, and may make its own."""
    mine = (item for item in request.session.items if item.module is request.module)
    if all(map(_needs_another_ray, mine)):
        close_session()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """What a failed test leaves on the local Ray ends before anything else looks: its own fixtures, the
    next test. Its traceback would keep its actors, and every later test wait for their end and fail.
    """
    report = yield
    if report.failed and not _needs_another_ray(item) and ray.is_initialized():
        clear_away()
    return report


@pytest.fixture
def start_driver(request, tmp_path):
    """Starts a driver of the module's JOB as the leader of its own process group, as a shell would."""
    drivers = []

    def start():
        command = [sys.executable, "-m", "tests.support.driver", str(tmp_path), *request.module.JOB]
        driver = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        drivers.append(driver)
        return driver

    yield start
    for driver in drivers:
        driver.kill()
        driver.wait(100)
        driver.stdout.close()
