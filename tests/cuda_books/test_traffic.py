"""NCCL's part in a trace, on traces written by hand."""

from tests.cuda_books.books import traffic_of

PRODUCT = "3\t7\tgemm\t0x10\tgemm 1x1x1"


def call(what, *, sent=0, received=0, over="0xc"):
    return f"1\t7\tnccl\t0x20\t{what}\t0x1000\t{sent}\t0x2000\t{received}\t{over}\t2"


def test_calls_and_bytes_are_counted_by_kind():
    gather = call("all_gather", sent=8, received=16)
    found = traffic_of([gather, gather, call("send", sent=4), PRODUCT])
    assert found.figures() == {
        "all_gather_calls": 2,
        "all_gather_bytes": 32,
        "send_calls": 1,
        "send_bytes": 4,
    }
    assert found.used == {"0xc"}


def test_communicators_are_followed_from_opening_to_abort():
    found = traffic_of(
        ["1\t7\tcommunicator\t0xc\t4", "2\t7\tcommunicator\t0xd\t4", "3\t8\tclosed\t0xc"]
    )
    assert found.opened == {"0xc", "0xd"} and found.closed == {"0xc"} and not found.used


def test_a_receive_is_early_until_the_first_product_is_queued():
    receive, send = call("recv", received=4), call("send", sent=4)
    assert traffic_of([receive, send, PRODUCT, receive]).early_receives == 1
    assert traffic_of([PRODUCT, receive]).early_receives == 0
    assert traffic_of([receive, receive, PRODUCT]).early_receives == 2


def test_an_exchange_sends_as_it_receives_and_is_not_early():
    send, receive = call("send", sent=4), call("recv", received=4)
    assert traffic_of([send, receive, send, receive, PRODUCT]).early_receives == 0
    assert traffic_of([receive, send, receive, PRODUCT]).early_receives == 1
