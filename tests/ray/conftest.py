import pytest

from raymega.session import close_session, open_session


@pytest.fixture(scope="module")
def local_ray():
    """One private Ray for all tests of a module."""
    yield open_session("local", num_cpus=4)
    close_session()
