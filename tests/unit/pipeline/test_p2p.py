"""Transfers: what is kept until when, what is refused, what a failure says."""

import pytest
import torch

from raymega.errors import CommunicationError, Fault, InternalError
from raymega.pipeline import p2p
from raymega.schedule.instructions import Instruction, Op
from raymega.schedule.stage_placement import Placement
from tests.unit.pipeline.conftest import make_p2p

SHAPE = (1, 2, 3)


class FakePending:
    def __init__(self, error=None):
        self.is_finished, self.error, self.waited_s = False, error, []

    def is_done(self):
        return self.is_finished

    def wait(self, timeout_s):
        self.waited_s.append(timeout_s)
        if self.error:
            raise self.error


@pytest.fixture
def posted(monkeypatch):
    """Every send that was posted: (its pending, tensor, group, peer, tag)."""
    posted = []

    def isend(tensor, group, peer, tag):
        posted.append((FakePending(), tensor, group, peer, tag))
        return posted[-1][0]

    monkeypatch.setattr(p2p, "isend", isend)
    return posted


@pytest.fixture
def asked(monkeypatch):
    """Every receive that was posted: (its pending, peer, tag); ``asked.error`` keeps one from it."""

    class Asked(list):
        error = None

    asked = Asked()

    def irecv(tensor, group, peer, tag):
        if asked.error:
            raise asked.error
        asked.append((FakePending(), peer, tag))
        return asked[-1][0]

    monkeypatch.setattr(p2p, "irecv", irecv)
    return asked


def _tensor():
    return torch.zeros(SHAPE, dtype=torch.float64)


def _task(op, micro_batch, chunk=0):
    return Instruction(op=op, micro_batch=micro_batch, chunk=chunk)


def _down(micro_batch, chunk=0):
    return _task(Op.SEND_FORWARD, micro_batch, chunk)


def test_activations_go_to_the_next_stage_and_gradients_to_the_one_before(middle, posted):
    middle.post_send(_tensor(), _down(5))
    middle.post_send(_tensor(), _task(Op.SEND_BACKWARD, 6))
    assert [(send[2].name, send[3]) for send in posted] == [("pp_forward", 2), ("pp_backward", 0)]


def test_messages_to_higher_and_to_lower_ranks_never_share_a_communicator(posted):
    """Two ranks in a loop exchange activations in both directions; so do two in a vee."""
    for is_vee in (False, True):
        placement = Placement(pp=2, chunks=2, is_vee=is_vee)
        for rank, group in ((0, "pp_forward"), (1, "pp_backward")):
            posted.clear()
            p2p = make_p2p(placement, rank)
            for op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
                for chunk in range(2):
                    if placement.message(rank, _task(op, 0, chunk)) is not None:
                        p2p.post_send(_tensor(), _task(op, 0, chunk))
            assert {send[2].name for send in posted} == {group}


@pytest.mark.parametrize("is_vee", [False, True])
def test_no_two_messages_between_two_ranks_have_the_same_tag(is_vee, posted):
    placement = Placement(pp=2, chunks=4, is_vee=is_vee)
    p2p = make_p2p(placement, 0)
    for op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
        for micro_batch in range(5):
            for chunk in range(4):
                if placement.message(0, _task(op, micro_batch, chunk)) is not None:
                    p2p.post_send(_tensor(), _task(op, micro_batch, chunk))
    tags = [send[4] for send in posted]
    assert len(set(tags)) == len(tags) >= 20


def test_message_to_the_ranks_own_next_chunk_is_handed_over(posted):
    last_of_vee = make_p2p(Placement(pp=2, chunks=2, is_vee=True), 1)
    tensor = _tensor()
    last_of_vee.post_send(tensor, _down(3))
    assert last_of_vee.recv(_task(Op.RECV_FORWARD, 3, chunk=1)) is tensor
    assert posted == []


def test_send_is_not_waited_for_where_it_is_posted_but_at_the_end(middle, posted):
    middle.post_send(_tensor(), _down(0))
    middle.post_send(_tensor(), _down(1))
    assert [send[0].waited_s for send in posted] == [[], []]
    middle.wait_all()
    middle.wait_all()
    assert [send[0].waited_s for send in posted] == [[1.0], [1.0]]


def test_finished_sends_are_let_go_before_the_end(middle, posted):
    middle.post_send(_tensor(), _down(0))
    posted[0][0].is_finished = True
    middle.post_send(_tensor(), _down(1))
    assert [send.message.micro_batch for send in middle._sends] == [1]


def test_strided_tensor_is_sent_as_its_values(middle, posted):
    strided = torch.arange(6, dtype=torch.float64).view(3, 2).t()[None]
    middle.post_send(strided, _down(0))
    sent = posted[0][1]
    assert sent.is_contiguous() and torch.equal(sent, strided)


def test_failed_send_names_both_stages_and_keeps_cause_and_remedy(middle, posted):
    middle.post_send(_tensor(), _task(Op.SEND_BACKWARD, 4, chunk=1))
    posted[0][0].error = CommunicationError(Fault(fact="it broke", rule="rule", remedy="remedy"))
    with pytest.raises(CommunicationError) as caught:
        middle.wait_all()
    assert caught.value.faults == (
        Fault(
            fact="stage 4, sending the gradient of micro-batch 4 to stage 3: it broke",
            rule="rule",
            remedy="remedy",
        ),
    )


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1, 2, 4, dtype=torch.float64), torch.zeros(SHAPE)],
    ids=["shape", "dtype"],
)
def test_tensor_that_the_neighbour_does_not_expect_is_not_sent(tensor, middle, posted):
    with pytest.raises(InternalError, match="stage 1, activation of micro-batch 5"):
        middle.post_send(tensor, _down(5))
    assert posted == []


def test_micro_batch_may_have_a_length_of_its_own(middle, posted):
    long = torch.zeros(4, *SHAPE[1:], dtype=torch.float64)
    middle.post_send(long, _down(5), length=4)
    assert posted[0][1].shape == (4, 2, 3)


def test_tensor_of_another_length_than_its_micro_batch_is_not_sent(middle, posted):
    with pytest.raises(InternalError, match=r"micro-batch 5: shape \(1, 2, 3\).*\(4, 2, 3\)"):
        middle.post_send(_tensor(), _down(5), length=4)
    assert posted == []


def _receives():
    """Two activations from the rank before, two gradients from the rank after."""
    return [_task(op, m) for m in (0, 1) for op in (Op.RECV_FORWARD, Op.RECV_BACKWARD)]


def test_receive_that_was_posted_is_waited_for_where_it_is_needed(middle, asked):
    for receive in _receives():
        middle.post_receive(receive)
    assert [peer for _, peer, _ in asked] == [0, 2, 0, 2]
    middle.recv(_receives()[0])
    assert [pending.waited_s for pending, _, _ in asked] == [[1.0], [], [], []]
    for receive in _receives()[1:]:
        middle.recv(receive)
    assert len({(peer, tag) for _, peer, tag in asked}) == len(asked) == 4


def test_receive_that_was_not_posted_is_posted_where_it_is_needed(middle, asked):
    middle.recv(_receives()[0])
    assert [(peer, pending.waited_s) for pending, peer, _ in asked] == [(0, [1.0])]


def test_receive_posted_ahead_has_the_length_of_its_micro_batch(middle, asked):
    middle.post_receive(_receives()[0], length=4)
    middle.post_receive(_receives()[2], length=7)
    assert middle.recv(_receives()[0]).shape == (4, 2, 3)
    assert middle.recv(_receives()[2]).shape == (7, 2, 3)
    assert len(asked) == 2


def test_receive_that_cannot_be_posted_ahead_is_told_to_whoever_needs_it(middle, asked):
    asked.error = CommunicationError(Fault(fact="it is gone", rule="rule", remedy="remedy"))
    middle.post_receive(_receives()[2])
    with pytest.raises(CommunicationError, match="the activation of micro-batch 1 from stage 0"):
        middle.recv(_receives()[2])


def test_large_message_over_gloo_is_received_where_it_is_needed(middle, asked, monkeypatch):
    monkeypatch.setattr(p2p, "AHEAD_BYTES", 47)
    middle.post_receive(_receives()[0])
    assert asked == []
    middle.recv(_receives()[0])
    assert len(asked) == 1


def test_message_from_the_ranks_own_chunk_is_not_posted(asked):
    last_of_vee = make_p2p(Placement(pp=2, chunks=2, is_vee=True), 1)
    last_of_vee.post_receive(_task(Op.RECV_FORWARD, 3, chunk=1))
    assert asked == []
