"""The harness itself: results, failures told once and soon, and no process left behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from raymega.parallel.comm.collectives import all_reduce, barrier
from raymega.plan.grid import Grid
from tests.support import ranks
from tests.support.ranks import ENDLESS_S, RankFailureError, run_alone, run_grid, run_ranks

pytestmark = pytest.mark.dist


def _sum_ranks(env, offset):
    return all_reduce(torch.tensor([env.rank + offset]), env.groups.world)


def test_results_come_back_by_rank():
    results = run_grid(_sum_ranks, Grid(dp=3), 10.0)
    assert [result.tolist() for result in results] == [[33.0]] * 3


def test_function_whose_module_loads_a_heavy_package_is_refused():
    # as a rank of run_grid gets it: the test's function is an argument of the harness's own
    work = (2, "store", 10.0, ranks._in_grid, (_sum_ranks, (Grid(), 1, False), (10.0,)))
    ranks.refuse_heavy(work, {"torch", "numpy"})
    with pytest.raises(
        ImportError,
        match=r"^tests.dist.train.test_ranks: each rank loads ray, transformers with it",
    ):
        ranks.refuse_heavy(work, {"torch", "ray", "transformers"})


def _settings(_rank, _world_size):
    return os.getpid(), os.environ["OMP_NUM_THREADS"], torch.get_num_threads()


def test_processes_are_fresh_and_have_one_thread():
    seen = run_ranks(_settings, 2) + run_ranks(_settings, 2)
    assert len({pid for pid, _, _ in seen}) == 4
    assert {(variable, threads) for _, variable, threads in seen} == {("1", 1)}


def _fail_on_rank_1(env, how):
    if env.rank == 1:
        how()
    barrier(env.groups.world)


def _raise():
    raise ValueError("the cause")


def test_an_exception_is_shown_once_though_others_suffer():
    with pytest.raises(RankFailureError) as caught:
        run_grid(_fail_on_rank_1, Grid(dp=3), _raise)
    text = str(caught.value)
    assert text.startswith("rank 1 of 3: Traceback")
    assert text.count("Traceback") == 1 and text.count("ValueError: the cause") == 1
    assert "\nrank 0: " in text and "\nrank 2: " in text


def _abort_on_rank_1(env, path):
    """When rank 0 has begun to sleep."""
    if env.rank == 0:
        path.touch()
        _sleep_until_killed()
    _wait_until(path.exists)
    os.abort()


def test_an_abort_of_one_rank_fails_the_test_whatever_the_others_do(tmp_path, monkeypatch):
    """They are given their grace and no more: of the test's own timeout nobody sees the end."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    with pytest.raises(RankFailureError) as caught:
        run_grid(_abort_on_rank_1, Grid(dp=2), tmp_path / "sleeps", timeout=ENDLESS_S)
    assert "rank 1 of 2: the process died of SIGABRT" in str(caught.value)
    assert "rank 0: did not end after that" in str(caught.value)


def _hang(_rank, _world_size):
    _sleep_until_killed()


def _sleep_until_killed():
    while True:
        time.sleep(60)


def test_a_rank_that_hangs_is_ended_at_the_timeout():
    with pytest.raises(RankFailureError, match=r"rank 0 of 2: no result after 0\.5 s") as caught:
        run_ranks(_hang, 2, timeout=0.5, collective_timeout_s=ENDLESS_S)
    assert "rank 1: no result after 0.5 s" in str(caught.value)


SESSION = """
import time
from tests.support import ranks
ranks.PRELOADED[:] = ["tests.support.ranks"]
from tests.dist.train.test_ranks import write_pid_and_hang
ranks.run_alone(write_pid_and_hang, {path!r})
"""


def write_pid_and_hang(path):
    Path(path).write_text(f"{os.getpid()} {os.getppid()}\n")
    _sleep_until_killed()


def test_ranks_and_forkserver_end_when_the_session_is_killed(tmp_path):
    path = tmp_path / "pids"
    root = Path(__file__).parents[3]
    session = subprocess.Popen([sys.executable, "-c", SESSION.format(path=str(path))], cwd=root)
    _wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    session.kill()
    session.wait()
    for pid in map(int, path.read_text().split()):
        _wait_until(lambda pid=pid: not _is_alive(pid))


def _is_alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _wait_until(is_true, limit_s=100):
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def _has_world():
    return torch.distributed.is_initialized()


def test_one_process_may_run_without_a_world():
    assert run_alone(_has_world) is False
