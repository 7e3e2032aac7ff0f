"""Set before torch and ray are imported, for every test and the processes that it starts."""

import atexit
import gc
import os
import sys

# One thread per process, as several ranks share few cores.
os.environ["OMP_NUM_THREADS"] = "1"
# A token that some Ray once left in the home folder must not decide how test clusters talk.
os.environ["RAY_AUTH_MODE"] = "disabled"
# Ray's own 15 would starve workers beside anything else that this machine does.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray spells it so

import pytest
from hypothesis import settings  # after the environment is set

# A deadline per example measures how busy the machine is.
settings.register_profile("raymega", deadline=None)
settings.load_profile("raymega")

pytest_plugins = ["tests.support.selection"]


class Session:
    """The session of this process, unless it is a worker of xdist."""

    current: pytest.Session | None = None


def pytest_collection_finish():
    """What is loaded by now stays: no later collection of garbage looks at it again."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):
        Session.current = session


@atexit.register  # first to be registered, last to run
def leave_at_once():
    """Threads of Ray's clients live on while C++ takes its statics down, and one crashed there: SIGSEGV
    after "83 passed". Whatever Python has to do at its end is done by now.
    """
    if Session.current is not None and "ray" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(Session.current.exitstatus))
