"""How far a command is: a line of the terminal that goes away again, or a line of the log now and then."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from fourfold.reporting import LiveLine, clock_time, how_far


class Waiting:
    """Shows how far something is, where it takes long."""

    def __init__(self, line: LiveLine):
        self._line = line

    def bytes(self, what: str, done: int, total: int, seconds: float) -> None:
        """Show how many bytes are done, after so many seconds."""
        self._line.wait(how_far(what, done, total, seconds), seconds)

    def tokens(self, what: str, done: int, total: int, seconds: float) -> None:
        """Show how many tokens are there, after so many seconds."""
        rate = done / seconds if seconds else 0.0
        left = clock_time((total - done) / rate) if rate else "-"
        line = f"{what}: {done:,} of {total:,} tokens  {rate:,.1f} tokens/s  {left} left"
        self._line.wait(line, seconds)


@contextmanager
def waiting(console: Console | None = None) -> Iterator[Waiting]:
    """Yield what shows how far a command is, on stderr; on a terminal nothing is left of it in the end."""
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield Waiting(LiveLine(console))
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield Waiting(LiveLine(console, live))
