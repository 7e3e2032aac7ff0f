"""The race checker on traces written by hand: each way to be ordered, and each way to be not."""

import pytest

from tests.cuda_books.happens_before import find_races
from tests.cuda_books.trace import read_trace

A, B = "10", "20"
KERNEL_WRITES = f"1\t7\tnote\t{A}|mul||1000:64"
SEND = f"5\t7\tnccl\t0x{B}\tsend\t0x1000\t64\t(nil)\t0\t0xc\t2"


def races(*lines: str) -> list[str]:
    return [race.kind for race in find_races(read_trace(lines))]


def test_other_stream_that_does_not_wait_races():
    assert races(KERNEL_WRITES, SEND) == ["read after write"]


@pytest.mark.parametrize(
    "between",
    [
        (f"2\t7\trecord\t0x{A}\t0xe", f"3\t7\twait\t0x{B}\t0xe"),
        (f"2\t7\tsync\tstream\t0x{A}",),
        ("2\t7\tsync\tdevice",),
        (f"2\t7\trecord\t0x{A}\t0xe", "3\t7\tsync\tevent\t0xe"),
        (f"2\t7\trecord\t0x{A}\t0xe", "3\t7\tquery\tevent\t0xe"),
        # by way of a third stream
        (f"2\t7\trecord\t0x{A}\t0xe", "3\t7\twait\t0x30\t0xe", "4\t7\trecord\t0x30\t0xf", f"4\t7\twait\t0x{B}\t0xf"),
    ],
    ids=["event", "stream", "device", "host waits for event", "query", "third stream"],
)  # fmt: skip
def test_ordered_operations_do_not_race(between):
    assert races(KERNEL_WRITES, *between, SEND) == []


@pytest.mark.parametrize(
    "between",
    [
        (f"2\t7\twait\t0x{B}\t0xe", f"3\t7\trecord\t0x{A}\t0xe"),
        ("2\t7\trecord\t0x30\t0xe", f"3\t7\twait\t0x{B}\t0xe"),
        (f"2\t7\tsync\tstream\t0x{B}",),
    ],
    ids=["waits before it is recorded", "event of another stream", "host waits for the wrong stream"],
)  # fmt: skip
def test_waits_that_order_nothing_do_not_hide_a_race(between):
    assert races(KERNEL_WRITES, *between, SEND) == ["read after write"]


def test_write_into_what_another_stream_still_reads_or_writes_races():
    reads = f"1\t7\tnote\t{A}|mul|1000:64|"
    receive = f"5\t7\tnccl\t0x{B}\trecv\t(nil)\t0\t0x1020\t64\t0xc\t2"
    assert races(reads, receive) == ["write after read"]
    assert races(KERNEL_WRITES, receive) == ["write after write"]


def test_reads_and_neighbouring_memory_do_not_race():
    assert races(f"1\t7\tnote\t{A}|mul|1000:64|", SEND) == []
    assert races(f"1\t7\tnote\t{A}|mul||1040:64", SEND) == []


def test_an_early_operation_that_is_over_hides_no_later_one_that_is_not():
    later = f"4\t7\tnote\t{A}|add||1000:64"
    ordered = (KERNEL_WRITES, f"2\t7\trecord\t0x{A}\t0xe", f"3\t7\twait\t0x{B}\t0xe")
    assert races(*ordered, later, SEND) == ["read after write"]


@pytest.mark.parametrize("wait", ["sync\tevent\t0xe", "query\tevent\t0xe", "sync\tdevice"])
def test_what_a_thread_that_launches_nothing_waits_for_orders_nothing(wait):
    between = (f"2\t7\trecord\t0x{A}\t0xe", f"3\t8\t{wait}")
    assert races(KERNEL_WRITES, *between, SEND) == ["read after write"]
    assert races(KERNEL_WRITES, between[0], f"3\t7\t{wait}", SEND) == []


def test_an_all_gather_in_place_reads_its_own_part_and_writes_the_others():
    gather = f"5\t7\tnccl\t0x{B}\tall_gather\t0x1040\t64\t0x1000\t192\t0xc\t3"
    assert races(f"1\t7\tnote\t{A}|mul|1040:64|", gather) == []
    assert races(f"1\t7\tnote\t{A}|mul||1040:64", gather) == ["read after write"]
    assert races(f"1\t7\tnote\t{A}|mul|1000:64|", gather) == ["write after read"]
    assert races(f"1\t7\tnote\t{A}|mul|1080:64|", gather) == ["write after read"]


PINNED_COPY = f"2\t7\tcopy\t0x{B}\th2d\t64\tpinned\t0x9000\t0x1000"
HOST_WRITES = "3\t7\tnote\t-1|fill||9000:64"


def test_the_host_may_not_overwrite_pinned_memory_that_a_copy_reads():
    assert races(PINNED_COPY, HOST_WRITES) == ["write after read"]
    assert races(PINNED_COPY, f"2\t7\tsync\tstream\t0x{B}", HOST_WRITES) == []
    assert races(PINNED_COPY, f"2\t7\tsync\tstream\t0x{A}", HOST_WRITES) == ["write after read"]
    queried = (f"2\t7\trecord\t0x{B}\t0xe", "3\t7\tquery\tevent\t0xe")
    assert races(PINNED_COPY, *queried, HOST_WRITES) == []
    assert races(PINNED_COPY, f"2\t7\twait\t0x{B}\t0xe", HOST_WRITES) == ["write after read"]


def test_what_is_launched_comes_after_what_the_host_did():
    assert races(HOST_WRITES, PINNED_COPY) == []
    between = (f"4\t7\trecord\t0x{A}\t0xe", PINNED_COPY, "5\t7\tsync\tdevice")
    assert races(HOST_WRITES, *between, HOST_WRITES) == []
