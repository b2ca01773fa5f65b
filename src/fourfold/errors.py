"""Mistakes of the user: one message each, found before anything starts."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """One or more mistakes in what the user asked for.

    Each message says what was asked, the rule, and values that would work. The command line prints the
    messages and ends with exit status 2, without a traceback. A message that comes twice is there once.
    """

    def __init__(self, *messages: str):
        self.messages = tuple(dict.fromkeys(messages))
        super().__init__("\n".join(self.messages))


class RunStopped(Exception):
    """A run that could not go on: what happened, at which step, on which rank.

    The command line prints the message and ends with exit status 1, without a traceback.
    """


class RunPaused(RunStopped):
    """A run that was asked to end: it saved, and can go on from there.

    The command line prints the message and ends with exit status 75, which says "try again" (EX_TEMPFAIL).
    """


class OutputClosed(RunStopped):
    """Nobody reads what is printed any more, as behind ``| head``.

    The command line ends without a word and with exit status 141, as a shell reports of a tool that SIGPIPE
    ended.
    """


class RankFailed(RunStopped):
    """A rank ended, or stood still, although the run could have gone on: it may do so when started again."""


class Unreadable(RankFailed):
    """A file that the system did not let us read now. It may be whole: nothing is done to it."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the valid name closest to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, list(valid), n=1)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def choices(values: Iterable[object]) -> str:
    """Return the values as prose: ``1, 2, 4 or 8``."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
