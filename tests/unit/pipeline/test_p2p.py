"""Transfers: what is kept until when, what is refused, what a failure says."""

import pytest
import torch

from raymega.errors import CommunicationError, Fault, InternalError
from raymega.pipeline import p2p

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


def _tensor():
    return torch.zeros(SHAPE, dtype=torch.float64)


def test_activations_go_to_the_next_stage_and_gradients_to_the_one_before(alone, posted):
    alone.post_send_forward(_tensor(), 5)
    alone.post_send_backward(_tensor(), 6)
    assert [send[3:] for send in posted] == [(1, 5), (-1, 6)]


def test_send_is_not_waited_for_where_it_is_posted_but_at_the_end(alone, posted):
    alone.post_send_forward(_tensor(), 0)
    alone.post_send_forward(_tensor(), 1)
    assert [send[0].waited_s for send in posted] == [[], []]
    alone.wait_all()
    alone.wait_all()
    assert [send[0].waited_s for send in posted] == [[1.0], [1.0]]


def test_finished_sends_are_let_go_before_the_end(alone, posted):
    alone.post_send_forward(_tensor(), 0)
    posted[0][0].is_finished = True
    alone.post_send_forward(_tensor(), 1)
    assert [send.micro_batch for send in alone._sends] == [1]


def test_strided_tensor_is_sent_as_its_values(alone, posted):
    strided = torch.arange(6, dtype=torch.float64).view(3, 2).t()[None]
    alone.post_send_forward(strided, 0)
    sent = posted[0][1]
    assert sent.is_contiguous() and torch.equal(sent, strided)


def test_failed_send_names_both_stages_and_keeps_cause_and_remedy(alone, posted):
    alone.post_send_backward(_tensor(), 4)
    posted[0][0].error = CommunicationError(Fault(fact="it broke", rule="rule", remedy="remedy"))
    with pytest.raises(CommunicationError) as caught:
        alone.wait_all()
    assert caught.value.faults == (
        Fault(
            fact="stage 0, sending the gradient of micro-batch 4 to stage -1: it broke",
            rule="rule",
            remedy="remedy",
        ),
    )


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1, 2, 4, dtype=torch.float64), torch.zeros(SHAPE)],
    ids=["shape", "dtype"],
)
def test_tensor_that_the_neighbour_does_not_expect_is_not_sent(tensor, alone, posted):
    with pytest.raises(InternalError, match="activation of micro-batch 5"):
        alone.post_send_forward(tensor, 5)
    assert posted == []
