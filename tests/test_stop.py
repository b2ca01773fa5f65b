"""Signals that ask a run to end."""

import os
import signal

import pytest

from fourfold import stop


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_a_signal_asks_and_does_not_end_the_process(number: signal.Signals):
    before = signal.getsignal(number)
    with stop.listening():
        assert not stop.is_asked()
        os.kill(os.getpid(), number)
        assert stop.is_asked()
        if number != signal.SIGINT:
            os.kill(os.getpid(), number)  # a scheduler may say it again
    assert signal.getsignal(number) is before
    with stop.listening():
        assert not stop.is_asked(), "a new run was not asked"


def test_the_second_ctrl_c_ends_the_process_as_before():
    # A shell lets what it runs in the background ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stop.listening():
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
