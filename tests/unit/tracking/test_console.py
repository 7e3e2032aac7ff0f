import io
from dataclasses import replace

from raymega.events import AttemptFailed, StepFinished
from raymega.tracking.console import ConsoleSink
from tests.unit.tracking.events import (
    RECOVERED,
    attempt_started,
    run_started,
    step_finished,
    whole_run,
)


def text_of(events, every=1):
    stream = io.StringIO()
    sink = ConsoleSink(stream, every=every)
    for event in events:
        sink.emit(event)
    sink.close(0.0)
    return stream.getvalue()


def test_console_prints_first_due_and_last_steps_only():
    events = [run_started(total_steps=25), attempt_started(1)]
    text = text_of(events + [step_finished(step) for step in range(1, 26)], every=10)
    steps = [line.split("/")[0] for line in text.splitlines() if line.startswith("step")]
    assert steps == ["step  1", "step 10", "step 20", "step 25"]


def test_step_lines_are_aligned_and_plain_without_a_terminal():
    text = text_of([run_started(total_steps=1000), step_finished(9), step_finished(1000)])
    lines = [line for line in text.splitlines() if line.startswith("step")]
    assert lines[0] == (
        "step    9/1000   loss   1.1111   grad norm    0.500   lr 3.000e-04"
        "        8,192 tokens/s      125.0 ms"
    )
    assert len({len(line) for line in lines}) == 1
    assert "\x1b" not in text


def test_step_line_leaves_out_what_was_not_measured():
    event = StepFinished(attempt=1, step=1, metrics={"train/loss": 2.0})
    line = text_of([run_started(), event]).splitlines()[-1]
    assert line == "step 1/4   loss   2.0000"


def test_every_event_is_one_sentence_on_one_line():
    events = whole_run()
    lines = text_of(events).splitlines()
    assert len(lines) == len(events) - 1, "memory is a number for curves"
    assert lines[1] == "Attempt 1 starts at step 0 on tp=2 pp=2 dp=2: first start."
    assert lines[2] == "2 workers started on 1 node."
    assert lines[3] == "Nodes checked in 0.2 s: versions are right on 1 node."
    assert lines[5] == "Bad step 2: loss=nan; recomputed, used the second pass"
    assert (
        lines[7]
        == "Validation at step 2: held loss 5.2500, perplexity 190.57, accuracy 0.6000, loss of the average 5.0000."
    )
    assert lines[8] == (
        "Tasks at step 2: lambada accuracy 0.25, target_perplexity 88.5; race accuracy 0.5."
    )
    assert lines[9].startswith("Checkpoint of step 2: 12.0 MiB, training stalled 12 ms")
    assert lines[12] == "Saving step 3: 25% of 2.0 MiB written."
    assert lines[13].startswith("Checkpoint of step 3 skipped")
    assert lines[14] == "Attempt 1 failed after step 3: killed by signal 9"
    assert lines[17] == (
        "Recovered: detected in 0.5 s, back 3.0 s later; resumed from step 2, 1 lost step recomputed."
    )
    assert lines[-1].startswith("Run demo finished at step 4 after 4 min 12 s; goodput 93.0%")


def test_state_from_memory_is_said():
    events = [
        replace(attempt_started(2, step=6, reason="rank 3 died"), source="memory"),
        replace(RECOVERED, source="memory"),
    ]
    first, second = text_of(events).splitlines()
    assert first.startswith("Attempt 2 starts at step 6 (in-memory snapshot) on tp=2")
    assert "resumed from step 2 (in-memory snapshot), 1 lost step recomputed" in second


def test_failure_of_no_known_worker_names_the_attempt():
    text = text_of([AttemptFailed(attempt=2, rank=-1, step=7, cause="no progress in 300 s")])
    assert text == "Attempt 2 failed after step 7: no progress in 300 s\n"
