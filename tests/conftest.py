"""Set before torch is imported: one thread per process, as several ranks share few cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
