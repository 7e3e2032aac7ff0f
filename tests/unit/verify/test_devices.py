"""Verification on another device: what one rank draws there, and what is refused before anything starts."""

import pytest

from raymega.errors import ConfigError
from raymega.verify import run
from raymega.verify.launch import count_gpus
from raymega.verify.legal_layouts import is_legal, layouts_of_one_rank, reference_layout
from raymega.verify.rounding import on_device
from raymega.verify.run import Options, Watcher, verify_job
from raymega.verify.shrink import shrink_job
from tests.unit.verify.jobs import make_job

JOB = make_job()


def _small(**options):
    return shrink_job(
        JOB, steps=3, max_params=2_000_000, max_ranks=1, is_data_there=True, **options
    )


def test_one_rank_draws_each_option_that_it_has_once():
    job = _small().job
    layouts = layouts_of_one_rank(job)
    assert layouts[0] == reference_layout(job) and len(set(layouts)) == len(layouts)
    assert all(layout.world_size == 1 and is_legal(job, layout) for layout in layouts)
    found = [layout.extras() for layout in layouts]
    for wanted in (
        "recompute full",
        "recompute every 2",
        "kernels compile",
        "recompute parts [norm]",
    ):
        assert any(wanted in text for text in found)
    assert {layout.micro_batch_size for layout in layouts} == {
        1,
        reference_layout(job).micro_batch_size,
    }


def test_ranks_go_to_the_device_and_the_reference_stays():
    job = _small().job
    assert (job.cluster.device, on_device(job, "cuda").cluster.device) == ("cpu", "cuda")
    gaps = " ".join(_small(device="cuda").untested)
    assert "one GPU" in gaps and "CPU processes" not in gaps


def test_without_a_gpu_it_is_refused_before_anything_starts(monkeypatch):
    def fail(**_):
        raise AssertionError("a process was started")

    monkeypatch.setattr(run, "count_gpus", lambda: 0)
    monkeypatch.setattr(run, "open_fork_server", fail)
    with pytest.raises(ConfigError, match="finds no GPU"):
        verify_job(JOB, Options(device="cuda"), Watcher())


@pytest.mark.parametrize(
    ("options", "is_resumed"),
    [({}, True), ({"layouts": 1}, False), ({"steps": 1}, False)],
    ids=str,
)
def test_that_no_checkpoint_is_resumed_is_said(options, is_resumed, monkeypatch):
    told = []

    class Told(Watcher):
        def on_start(self, shrunk, num_layouts):
            told.extend(shrunk.untested)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        verify_job(JOB, Options(**{"max_ranks": 2, "layouts": 3} | options), Told())
    assert (run.NOT_RESUMED in told) != is_resumed


def test_layouts_have_no_more_ranks_than_there_are_gpus(monkeypatch):
    monkeypatch.setattr(run, "count_gpus", lambda: 2)
    assert run._for_device(Options(device="cuda", max_ranks=8)).max_ranks == 2
    assert run._for_device(Options(max_ranks=8)).max_ranks == 8


def test_gpus_are_counted_in_another_process(monkeypatch):
    monkeypatch.setattr("raymega.verify.launch.COUNT_GPUS", "print('a note'); print(3)")
    assert count_gpus() == 3
    monkeypatch.setattr("raymega.verify.launch.COUNT_GPUS", "raise SystemExit(1)")
    assert count_gpus() == 0
