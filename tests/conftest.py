"""Set before torch and ray are imported, for every test and the processes that it starts."""

import os

# One thread per process, as several ranks share few cores.
os.environ["OMP_NUM_THREADS"] = "1"
# A token that some Ray once left in the home folder must not decide how test clusters talk.
os.environ["RAY_AUTH_MODE"] = "disabled"
# Ray's own 15 would starve workers beside anything else that this machine does.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray spells it so

from hypothesis import settings  # after the environment is set

# A deadline per example measures how busy the machine is.
settings.register_profile("raymega", deadline=None)
settings.load_profile("raymega")

pytest_plugins = ["tests.support.selection"]
