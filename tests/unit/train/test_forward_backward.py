"""Evaluation of a run that evaluates nothing."""

from types import SimpleNamespace

from raymega.train.forward_backward import evaluate


def test_run_without_evaluation_has_no_held_out_loss():
    assert evaluate(SimpleNamespace(evaluation=None)) == {}
