import signal
import threading

import pytest

from raymega.orchestrate.driver.signals import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_and_second_interrupts(number):
    before = signal.getsignal(number)
    asked = []
    with pytest.raises(KeyboardInterrupt), stop_on_signals(lambda: asked.append(1)):
        signal.raise_signal(number)
        assert asked == [1]
        signal.raise_signal(number)
    assert asked == [1]
    assert signal.getsignal(number) is before


def test_other_threads_change_nothing():
    before, inside = signal.getsignal(signal.SIGINT), []

    def body():
        with stop_on_signals(lambda: None):
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(100)
    assert inside == [before]
