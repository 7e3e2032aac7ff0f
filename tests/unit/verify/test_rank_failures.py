"""Failures of ranks that verify starts: what is told of those that left half a report."""

import pytest

from raymega.verify import launch
from raymega.verify.results import failure_path, result_path


def test_rank_killed_before_it_wrote_its_report_is_told_as_such(tmp_path):
    failure_path(tmp_path, 0).touch()
    failure_path(tmp_path, 1).write_text("Traceback\nValueError: b\n")
    with pytest.raises(launch.LayoutFailedError, match="rank 1: ValueError: b"):
        launch._raise_failures(tmp_path, 2, [0], 5.0)
    with pytest.raises(launch.LayoutFailedError, match=r"no rank ended within 5 s"):
        launch._raise_failures(tmp_path, 2, [0, 1], 5.0)
    failure_path(tmp_path, 1).write_text("")
    with pytest.raises(launch.LayoutFailedError, match="rank 1: died without a report"):
        launch._raise_failures(tmp_path, 2, [0], 5.0)


def test_rank_that_hangs_behind_its_results_has_failed(tmp_path):
    for rank in range(2):
        result_path(tmp_path, rank).touch()
    launch._raise_failures(tmp_path, 2, [], 5.0)
    with pytest.raises(launch.LayoutFailedError, match="rank 1: killed while it waited"):
        launch._raise_failures(tmp_path, 2, [1], 5.0)
    with pytest.raises(launch.LayoutFailedError, match=r"no rank ended within 5 s"):
        launch._raise_failures(tmp_path, 2, [0, 1], 5.0)


@pytest.mark.parametrize("wrong", range(4))
def test_the_number_of_every_worker_beside_a_run_is_compared(wrong):
    """Those of the workers behind the run's last rank were dropped."""
    scores = [{"loss": 3.0 if worker == wrong else 2.0} for worker in range(4)]
    for num_ranks in (1, 2, 3, 4, 6):
        found = [each["loss"] for each in launch.shared_out(scores, num_ranks)]
        assert len(found) == num_ranks and max(found) > 2.2
    assert launch.shared_out([{"loss": 2.5}] * 4, 3) == [{"loss": 2.5}] * 3
