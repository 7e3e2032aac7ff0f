import pytest

from raymega import api
from raymega.chaos import command
from raymega.chaos.faults import KINDS, PHASES, ChaosFault, legal_cells, parse_faults
from raymega.errors import ConfigError
from tests.support.command import VERIFY


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
        ("kil-worker@5", "nearest is kill-worker"),
        ("kill-worker", "does not say when"),
        ("kill-worker@lunch", "does not say when"),
        ("raise@spawn", "cannot come in phase spawn"),
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
    options = command.DrillOptions(**(given | asked))
    job = api.load_job(VERIFY, ("tracking.mlflow_uri=off",))
    with pytest.raises(ConfigError, match=r"takes root.*or take freeze-node"):
        command.drill(VERIFY, (), job, options)
    assert not (tmp_path / "out").exists()
