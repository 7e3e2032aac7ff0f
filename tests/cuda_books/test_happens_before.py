"""The race checker on traces written by hand: each way to be ordered, and each way to be not."""

import pytest

from tests.cuda_books.happens_before import find_races
from tests.cuda_books.trace import read_trace

A, B = "10", "20"
KERNEL_WRITES = f"1\tnote\t{A}|mul||1000:64"
SEND = f"5\tnccl\t0x{B}\tsend\t0x1000\t64\t(nil)\t0\t0xc\t2"


def races(*lines: str) -> list[str]:
    return [race.kind for race in find_races(read_trace(lines))]


def test_other_stream_that_does_not_wait_races():
    assert races(KERNEL_WRITES, SEND) == ["read after write"]


@pytest.mark.parametrize(
    "between",
    [
        (f"2\trecord\t0x{A}\t0xe", f"3\twait\t0x{B}\t0xe"),
        (f"2\tsync\tstream\t0x{A}",),
        ("2\tsync\tdevice",),
        (f"2\trecord\t0x{A}\t0xe", "3\tsync\tevent\t0xe"),
        (f"2\trecord\t0x{A}\t0xe", "3\tquery\tevent\t0xe"),
        # by way of a third stream
        (f"2\trecord\t0x{A}\t0xe", "3\twait\t0x30\t0xe", "4\trecord\t0x30\t0xf", f"4\twait\t0x{B}\t0xf"),
    ],
    ids=["event", "stream", "device", "host waits for event", "query", "third stream"],
)  # fmt: skip
def test_ordered_operations_do_not_race(between):
    assert races(KERNEL_WRITES, *between, SEND) == []


@pytest.mark.parametrize(
    "between",
    [
        (f"2\twait\t0x{B}\t0xe", f"3\trecord\t0x{A}\t0xe"),
        ("2\trecord\t0x30\t0xe", f"3\twait\t0x{B}\t0xe"),
        (f"2\tsync\tstream\t0x{B}",),
    ],
    ids=["waits before it is recorded", "event of another stream", "host waits for the wrong stream"],
)  # fmt: skip
def test_waits_that_order_nothing_do_not_hide_a_race(between):
    assert races(KERNEL_WRITES, *between, SEND) == ["read after write"]


def test_write_into_what_another_stream_still_reads_or_writes_races():
    reads = f"1\tnote\t{A}|mul|1000:64|"
    receive = f"5\tnccl\t0x{B}\trecv\t(nil)\t0\t0x1020\t64\t0xc\t2"
    assert races(reads, receive) == ["write after read"]
    assert races(KERNEL_WRITES, receive) == ["write after write"]


HOST_FILLS = "4\tnote\t-1|copy_||9000:64"
COPY_IN = f"2\tcopy\t0x{A}\th2d\t64\tpinned\t0x9000\t0x1000"


def test_host_may_not_write_what_a_copy_still_reads():
    assert races(COPY_IN, HOST_FILLS) == ["write after read"]
    assert races(COPY_IN, f"3\tsync\tstream\t0x{B}", HOST_FILLS) == ["write after read"]
    assert races(COPY_IN, f"3\tsync\tstream\t0x{A}", HOST_FILLS) == []
    recorded = (f"3\trecord\t0x{A}\t0xe", "3\tquery\tevent\t0xe")
    assert races(COPY_IN, *recorded, HOST_FILLS) == []


def test_copy_that_is_launched_after_the_host_wrote_does_not_race():
    assert races(HOST_FILLS, COPY_IN) == []
    assert races(HOST_FILLS, COPY_IN, "5\tsync\tdevice", HOST_FILLS, COPY_IN) == []


def test_reads_and_neighbouring_memory_do_not_race():
    assert races(f"1\tnote\t{A}|mul|1000:64|", SEND) == []
    assert races(f"1\tnote\t{A}|mul||1040:64", SEND) == []


def test_an_early_operation_that_is_over_hides_no_later_one_that_is_not():
    later = f"4\tnote\t{A}|add||1000:64"
    ordered = (KERNEL_WRITES, f"2\trecord\t0x{A}\t0xe", f"3\twait\t0x{B}\t0xe")
    assert races(*ordered, later, SEND) == ["read after write"]
