import subprocess
import sys

import pytest

from raymega.session import close_session, open_session


@pytest.fixture(scope="module")
def local_ray():
    """One private Ray for all tests of a module."""
    yield open_session("local", num_cpus=4)
    close_session()


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
        driver.wait(10)
        driver.stdout.close()
