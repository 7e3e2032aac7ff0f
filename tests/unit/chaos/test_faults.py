import pytest

from raymega.chaos.faults import KINDS, PHASES, ChaosFault, legal_cells, parse_faults


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
    cells = legal_cells()
    assert len(cells) == len(set(cells)) == len(KINDS) * len(PHASES) - 1
