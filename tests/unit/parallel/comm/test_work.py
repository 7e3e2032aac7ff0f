"""An operation under way keeps what it reads until it is done, and no longer."""

import weakref

from raymega.parallel.comm.work import WaitTimer, Work


class Buffer:
    pass


def test_what_an_operation_reads_lives_until_its_wait():
    buffer, waited = Buffer(), []
    ref = weakref.ref(buffer)
    work = Work(str, object(), lambda *given: waited.append(given), WaitTimer(), keeps_alive=buffer)
    del buffer
    assert ref() is not None
    work.wait(7.0)
    assert ref() is None
    assert waited == [(work._work, 7.0)]
