import pytest

from fourfold.errors import UserError
from fourfold.specs.schedule_name import SCHEDULE_RULES, ScheduleName, written_names


@pytest.mark.parametrize(
    ("text", "name", "stages"),
    [
        ("gpipe", ScheduleName("gpipe"), 1),
        ("1f1b", ScheduleName("1f1b"), 1),
        ("1f1b7", ScheduleName("1f1b", 7), 1),
        ("interleaved2", ScheduleName("interleaved", 2), 2),
        ("bfs12", ScheduleName("bfs", 12), 12),
        ("zb-h1", ScheduleName("zb-h1"), 1),
        ("zb-h2", ScheduleName("zb-h2"), 1),
        ("zbv", ScheduleName("zbv"), 2),
        ("dualpipev", ScheduleName("dualpipev"), 2),
        ("auto", ScheduleName("auto"), None),
        ("auto8", ScheduleName("auto", 8), None),
        ("my/own2.csv", ScheduleName("my/own2.csv"), None),
        ("own.json", ScheduleName("own.json"), None),
    ],
)
def test_a_name_reads_as_it_is_written(text: str, name: ScheduleName, stages: int | None) -> None:
    assert ScheduleName.parse(text) == name
    assert str(name) == text
    assert name.stages_per_rank == stages
    assert name.is_file == text.endswith((".csv", ".json"))


def test_every_schedule_can_be_named() -> None:
    assert [ScheduleName.parse(text).name for text in written_names()] == list(SCHEDULE_RULES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1f1bb", "there is no schedule '1f1bb'. Did you mean '1f1b'? Use gpipe, 1f1b, interleaved2"),
        ("interleave2", "there is no schedule 'interleave2'. Did you mean 'interleaved'?"),
        ("", "there is no schedule ''. Use gpipe"),
        (
            "mine.CSV",
            "there is no schedule 'mine.CSV'. Use gpipe, 1f1b, interleaved2, bfs2, zb-h1, zb-h2, zbv, "
            "dualpipev or auto, or the path of a file that ends in .csv or .json",
        ),
        ("zb-h3", "there is no schedule 'zb-h3'. Did you mean 'zb-h"),
        ("gpipe2", "schedule 'gpipe2': gpipe takes no number, write gpipe"),
        ("zbv2", "schedule 'zbv2': zbv takes no number, write zbv"),
        ("interleaved", "schedule 'interleaved' needs a number (stages a rank): write e.g. interleaved2"),
        ("bfs", "schedule 'bfs' needs a number (stages a rank): write e.g. bfs2"),
        ("bfs0", "schedule 'bfs0': the number (stages a rank) must be at least 1"),
        ("auto0", "schedule 'auto0': the number (most microbatches in flight on a rank) must be at least 1"),
    ],
)
def test_a_wrong_name_is_refused_with_what_would_be_right(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        ScheduleName.parse(text)
    assert str(error.value).startswith(message)
