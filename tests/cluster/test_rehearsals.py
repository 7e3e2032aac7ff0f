"""The shipped cluster files, brought up by `ray up` on machines of namespaces, survive their faults.

Minutes each, and as root: not part of a plain run. `make rehearse` runs them.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "cluster"))

from rehearsal import hosts  # noqa: E402

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing() or "it can"),
]


def figures(name):
    """Of a rehearsal in a process of its own, which cleans up after itself when it is interrupted."""
    command = [sys.executable, ROOT / "cluster" / "rehearse.py", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0
    return json.loads(done.stdout.splitlines()[-1])


def test_own_machines_lose_one_and_a_cable_and_the_run_finishes():
    found = figures("on-premise")
    assert found["crash_run_exit_code"] == found["cut_run_exit_code"] == 0
    assert found["crash_noticed_s"] < 15
    # Five probes of 2 s each find a silent machine; Ray's defaults would need a minute.
    assert found["cut_noticed_s"] < 25
    assert found["crash_machines_at_work"] == found["cut_machines_at_work"] == 2
    assert found["nothing_left_running_s"] < 240, "workers go a minute after their head"


def test_amazon_gets_what_the_file_says_and_replaces_a_lost_instance():
    found = figures("aws")
    assert found["requests_differ_from_file"] == ""
    assert found["run_exit_code"] == 0
    assert found["instances_left"] == 0
    assert found["instances_terminated"] == 4  # head, two nodes, and the one that was lost
