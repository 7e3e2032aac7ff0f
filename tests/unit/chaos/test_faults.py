from itertools import combinations, islice
from statistics import mean

import pytest

from raymega import api
from raymega.chaos import command
from raymega.chaos.experiment import DrillOptions
from raymega.chaos.faults import (
    DRAWN,
    KINDS,
    PHASES,
    STEP_PHASES,
    ChaosFault,
    draw_faults,
    draw_victims,
    parse_faults,
)
from raymega.errors import ConfigError
from tests.support.command import VERIFY
from tests.support.fault_matrix import covering_pairs, legal_cells


def test_faults_are_read_in_their_order_with_steps_and_phases():
    faults = parse_faults("kill-worker@5, hang@restore,disk-full@upload:6", rank_of=[1, 0])
    assert faults == [
        ChaosFault(kind="kill-worker", phase="step", at=5, rank=1),
        ChaosFault(kind="hang", phase="restore", at=2, rank=0),
        ChaosFault(kind="disk-full", phase="upload", at=6, rank=-1),
    ]
    assert [fault.describe() for fault in faults] == [
        "kill-worker@5", "hang@restore:2", "disk-full@upload:6",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("kil-worker@5", "did you mean kill-worker?"),
        ("kill-worker", "does not say when"),
        ("kill-worker@lunch", "does not say when"),
        ("raise@spawn", "is not possible in phase spawn"),
        ("", "names nothing"),
    ],
)
def test_what_is_written_wrong_is_refused_with_a_remedy(text, word):
    with pytest.raises(ValueError) as caught:
        parse_faults(text)
    assert word in str(caught.value.args[0])


def test_all_mistakes_come_at_once():
    with pytest.raises(ValueError) as caught:
        parse_faults("kill-worker@5,oops@1,hang")
    assert len(caught.value.args) == 2


def test_cells_are_every_kind_in_every_phase_but_those_that_cannot_be():
    cells = [*legal_cells(), *legal_cells(has_network=True)]
    assert len(cells) == len(set(cells)) == len(KINDS) * len(PHASES) - 1


@pytest.mark.parametrize(
    "asked", [{"faults": "link-down@5"}, {"mtbf_s": 9.0, "kinds": "link-down"}]
)
def test_cable_that_this_machine_cannot_make_is_refused_before_anything_starts(
    asked, monkeypatch, tmp_path
):
    monkeypatch.setattr(command, "missing", lambda: "making network namespaces takes root")
    given = {"faults": "", "mtbf_s": 0.0, "kinds": "", "seconds": 0.0, "seed": 1, "nodes": 3}
    given |= {"hold_s": 3.0, "return_s": 9.0, "timeout_s": 60.0, "out": tmp_path / "out"}
    options = DrillOptions(**(given | asked))
    job = api.load_job(VERIFY, ("tracking.mlflow_uri=off",))
    with pytest.raises(ConfigError, match=r"takes root.*or use freeze-node"):
        command.drill(VERIFY, (), job, options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("asked", "settings", "told"),
    [
        ({"faults": "kill-worker@5", "seconds": 9.0}, (), "--seconds 9.0 without --mtbf"),
        ({"faults": "kill-worker@5", "kinds": "hang"}, (), "--kinds hang without --mtbf"),
        ({"faults": "mlflow-down@5"}, ("tracking.mlflow_uri=off",), "no database that could be"),
        ({"mtbf_s": 9.0, "kinds": "mlflow-down"}, ("tracking.trackers=[console]",), "no database"),
    ],
    ids=str,
)
def test_what_would_do_nothing_is_refused(asked, settings, told, tmp_path):
    options = DrillOptions(out=tmp_path / "out", **asked)
    with pytest.raises(ConfigError, match=told):
        command.drill(VERIFY, (), api.load_job(VERIFY, settings), options)
    assert not (tmp_path / "out").exists()


def test_nodes_have_whole_cpus_for_workers_that_ask_for_a_tenth_of_one(monkeypatch, tmp_path):
    asked = []

    def no_sandbox(**given):
        asked.append(given["cpus_per_node"])
        raise InterruptedError

    monkeypatch.setattr(command, "sandbox", no_sandbox)
    options = DrillOptions(
        faults="kill-worker@5", mtbf_s=0.0, kinds="", seconds=0.0, seed=1, nodes=3,
        hold_s=3.0, return_s=9.0, timeout_s=60.0, out=tmp_path / "out",
    )  # fmt: skip
    settings = ("tracking.mlflow_uri=off", "cluster.cpus_per_worker=0.1")
    with pytest.raises(InterruptedError):
        command.drill(VERIFY, settings, api.load_job(VERIFY, settings), options)
    assert asked == [1.0]


def test_blows_are_the_same_for_a_seed_and_have_the_mean_time_that_was_asked_for():
    first, again = (
        list(islice(draw_faults(mtbf_s=30, seed=7, world_size=4), 2000)) for _ in range(2)
    )
    assert first == again
    assert abs(mean(scheduled.after_s for scheduled in first) - 30) < 2
    assert {scheduled.kind for scheduled in first} == set(DRAWN)
    assert {scheduled.rank for scheduled in first} == {0, 1, 2, 3}
    assert first != list(islice(draw_faults(mtbf_s=30, seed=8, world_size=4), 2000))


def test_victims_are_ranks():
    assert set(draw_victims(100, seed=1, world_size=3)) == {0, 1, 2}


def values_of(run):
    return (run[0].kind, run[0].phase, run[-1].kind, run[-1].phase)


def test_pairs_cover_far_more_than_chance_and_each_kind_twice():
    runs = covering_pairs(seed=2026, size=40)
    covered = {pair for run in runs for pair in combinations(enumerate(values_of(run)), 2)}
    assert len(runs) == 40 and len(covered) > 0.8 * 40 * 6
    for place in (0, -1):
        assert {run[place].kind for run in runs} == {kind for kind, _ in legal_cells()}


def test_second_fault_of_a_start_has_an_attempt_that_begins():
    for run in covering_pairs(seed=2026, size=40):
        if len(run) == 3:
            assert run[1].kind == "kill-worker" and not KINDS[run[0].kind].ends_attempt
        else:
            assert KINDS[run[0].kind].ends_attempt or run[1].phase in STEP_PHASES
