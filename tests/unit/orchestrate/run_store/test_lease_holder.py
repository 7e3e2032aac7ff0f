"""Which processes are gone for certain."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from raymega.orchestrate.run_store import lease_holder
from raymega.orchestrate.run_store.lease_holder import is_gone, this_process

PRINT = (
    "from raymega.orchestrate.run_store.lease_holder import this_process as t; import pickle, sys; "
)
PRINT += "sys.stdout.buffer.write(pickle.dumps(t())); sys.stdout.flush(); sys.stdin.read()"


def test_this_process_lives():
    me = this_process()
    assert not is_gone(me)
    assert this_process().token != me.token


def test_other_process_is_gone_when_it_has_ended_collected_or_not():
    other = subprocess.Popen(
        [sys.executable, "-c", PRINT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    holder = pickle.load(other.stdout)
    assert holder.pid == other.pid and not is_gone(holder)
    other.kill()
    other.stdout.read()  # to its end
    stat = Path(f"/proc/{other.pid}/stat")
    while not stat.read_text().rpartition(")")[2].startswith(" Z"):
        pass
    assert is_gone(holder)
    other.communicate()
    assert is_gone(holder)


def test_pid_that_another_process_has_now_is_gone():
    assert is_gone(replace(this_process(), started="1"))


def test_process_of_another_user_that_proc_hides_is_not_gone_for_certain(tmp_path, monkeypatch):
    """With hidepid it has no entry there: its run was taken from it at once."""
    other = replace(this_process(), started="12345")
    monkeypatch.setattr(lease_holder, "PROC", tmp_path)
    monkeypatch.setattr(lease_holder.os, "kill", _refuse)
    assert not is_gone(other)


def _refuse(_pid, _signal):
    raise PermissionError


def test_nobody_knows_of_other_machines():
    assert not is_gone(replace(this_process(), machine="elsewhere", pid=2**22 + 1))
