"""Calls that may hang: of a store whose machine, or the link to it, is gone."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, function: Callable[[], Result]) -> Result:
    """Call the function in a thread of its own and return what it returns, or raise what it raises.

    Raises TimeoutError after ``seconds``; the thread is left behind then, and ends with the process.
    """
    answer: Future[Result] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return answer.result(timeout=seconds)
