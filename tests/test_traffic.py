"""What a collective sends, and its time on a link."""

import pytest

from fourfold.traffic import Event, seconds, sent_bytes


@pytest.mark.parametrize(
    ("op", "sent"),
    [
        ("all_reduce", 1200),
        ("reduce_scatter", 600),
        ("all_gather", 600),
        ("all_to_all", 600),
        ("broadcast", 800),
        ("reduce", 800),
        ("send", 800),
        ("recv", 0),
        ("barrier", 0),
    ],
)
def test_sent_bytes(op: str, sent: int) -> None:
    assert sent_bytes(Event(op, "dp", 800, "float32"), 4) == sent


def test_one_rank_sends_nothing() -> None:
    for op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "barrier"):
        event = Event(op, "dp", 800, "float32")
        assert sent_bytes(event, 1) == 0
        assert seconds(event, 1, bytes_per_second=1.0, latency_seconds=1.0) == 0


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("all_reduce", 4 * 0.5 + 12.0),  # up a tree and down again
        ("all_gather", 3 * 0.5 + 6.0),
        ("broadcast", 3 * 0.5 + 8.0),
        ("send", 0.5 + 8.0),
        ("recv", 0.5 + 8.0),
        ("barrier", 2 * 0.5),
    ],
)
def test_seconds(op: str, expected: float) -> None:
    size = 0 if op == "barrier" else 800
    assert (
        seconds(Event(op, "dp", size, "float32"), 4, bytes_per_second=100.0, latency_seconds=0.5) == expected
    )
