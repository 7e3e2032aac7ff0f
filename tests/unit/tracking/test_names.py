import pytest

from raymega.errors import InternalError
from raymega.events import Measured
from raymega.tracking.names import (
    METRICS,
    check_names,
    find_metric,
    metrics_of,
    standing_metrics_of,
)
from tests.unit.tracking.events import MEMORY, TIMELINE, whole_run


def test_names_are_unique_in_every_form():
    for form in ("name", "prometheus_name"):
        assert len({getattr(metric, form) for metric in METRICS}) == len(METRICS)


def test_short_names_are_unique_within_a_family():
    # A JSON line carries one family, so only there a clash would lose a value.
    keys = [(metric.name.partition("/")[0], metric.short_name) for metric in METRICS]
    assert len(set(keys)) == len(keys)


def test_names_carry_their_unit():
    suffixes = {"s": "_s", "bytes": "bytes", "tokens/s": ("tokens_per_s", "_per_worker")}
    for metric in METRICS:
        if metric.unit in suffixes:
            assert metric.name.endswith(suffixes[metric.unit]), metric.name
        assert metric.help.endswith("."), metric.name


def test_names_hold_every_metric_that_a_run_emits():
    emitted = {name for event in whole_run() for name in metrics_of(event)}
    emitted |= {name for event in whole_run() for name in standing_metrics_of(event)}
    measured = [event for event in whole_run() if isinstance(event, Measured)]
    by_rank = [row for event in measured for row in event.ranks.values()]
    emitted |= {name for row in by_rank for name in row}
    check_names(emitted)
    assert {find_metric(name).is_per_rank for row in by_rank for name in row} == {True}
    kept_by_the_sink = {
        "run/last_step_unix_s",
        "checkpoint/failed_saves",
        "checkpoint/skipped_saves",
        "run/bad_steps",
        "run/rollbacks",
    }
    rows = {find_metric(name).name for name in emitted}
    assert {metric.name for metric in METRICS} - rows == kept_by_the_sink


def test_part_of_a_metric_is_a_label_and_part_of_the_short_name():
    metric = find_metric("train/output_std/3")
    assert (metric.part, metric.of, metric.short_name) == ("layer", "3", "output_std/3")
    assert metric.prometheus_name == "raymega_train_output_std"


@pytest.mark.parametrize("name", ["train/output_std", "train/loss/3", "train/lost/3", "loss"])
def test_part_where_there_is_none_and_none_where_there_is_are_refused(name):
    with pytest.raises(InternalError, match=name):
        find_metric(name)


def test_rank_metrics_split_a_rank_s_time():
    row = TIMELINE.ranks
    assert row[0] == {"worker/forward_s": 1.0, "worker/backward_s": 2.0, "worker/transfer_s": 0.0}
    assert row[1] == {"worker/forward_s": 1.0, "worker/backward_s": 0.0, "worker/transfer_s": 1.0}


def test_memory_is_of_each_rank_and_its_largest_peak_of_the_run():
    assert MEMORY.ranks[1]["memory/peak_bytes"] == 96.0
    assert metrics_of(MEMORY) == {"memory/max_peak_bytes": 96.0, "worker/max_work_ratio": 2.0}


def test_timeline_tells_how_much_of_the_collectives_was_hidden():
    (metrics,) = [metrics_of(e) for e in whole_run() if "comm/exposed_s" in metrics_of(e)]
    assert (metrics["comm/exposed_s"], metrics["comm/hidden_share"]) == (0.5, 0.5)
    assert (metrics["comm/cp_exposed_s"], metrics["comm/cp_hidden_share"]) == (0.125, 0.75)


def test_find_metric_refuses_an_unknown_name():
    assert find_metric("train/loss").unit == "nats"
    with pytest.raises(InternalError, match="train/lost"):
        find_metric("train/lost")
