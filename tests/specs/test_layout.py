"""Layout: the notation, and the one function that holds the rules of what divides what."""

import itertools
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.specs import (
    AXES,
    BATCH_AXES,
    DATA_AXES,
    PLACEMENTS,
    PRESETS,
    REPLICATED,
    Layout,
    ModelSpec,
    Placement,
)
from fourfold.specs.layout import TP_OPTIONS

TINY = PRESETS["tiny"]  # 4 layers, 4 heads, 2 key/value heads, intermediate 88


def problems(text: str, *, model=TINY, batch=8, microbatches=1, sequence_length=64, world_size=None):
    return Layout.parse(text).problems(
        model, batch=batch, microbatches=microbatches, sequence_length=sequence_length, world_size=world_size
    )


def parse_messages(text: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        Layout.parse(text)
    return [message.removeprefix(f"layout '{text}': ") for message in caught.value.messages]


def test_notation_in_any_order_prints_in_one():
    layout = Layout.parse("tp2, fsdp4:zero2 ,cp2,pp2:1f1b")
    assert (layout.pp, layout.dp, layout.fsdp, layout.cp, layout.tp) == (2, 1, 4, 2, 2)
    assert layout.options == {"pp": "1f1b", "fsdp": "zero2"}
    assert str(layout) == "pp2:1f1b,fsdp4:zero2,cp2,tp2"
    assert layout.world_size == 32


def test_all_ones_prints_as_dp1():
    assert str(Layout()) == str(Layout.parse("tp1,pp1")) == "dp1"
    assert Layout.parse("dp1") == Layout()


degrees = st.sampled_from([1, 1, 2, 3, 8])
words = st.none() | st.from_regex(r"[a-z0-9-]+", fullmatch=True)
placements = st.sampled_from(list(PLACEMENTS))
grids = st.sampled_from([None, "ring", "ulysses", "ulysses1"])
channels = st.sampled_from([None, *TP_OPTIONS])
schedules = st.sampled_from(["gpipe", "1f1b", "1f1b3", "interleaved2", "zb-h1", "my/own.csv"])


@given(
    st.fixed_dictionaries(dict.fromkeys(AXES, degrees)),
    st.fixed_dictionaries(
        dict.fromkeys(AXES, words)
        | {"fsdp": placements, "pp": st.none() | schedules, "cp": grids, "tp": channels}
    ),
)
def test_round_trip(sizes, options):
    layout = Layout(**sizes, options={axis: option for axis, option in options.items() if option})
    assert Layout.parse(str(layout)) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert hash(Layout.parse(str(layout))) == hash(layout)


def test_all_mistakes_of_the_notation_at_once():
    assert parse_messages("dp2,tp0,ppp4,dp4,cpx,fsdp:zero2,pp4:,4,cp-1") == [
        "tp=0 is too small: use 1 or more",
        "axis 'ppp' does not exist. Did you mean 'pp'? Axes: pp, dp, fsdp, cp, tp",
        "axis 'dp' is given twice: write it once",
        "axis 'cpx' does not exist. Did you mean 'cp'? Axes: pp, dp, fsdp, cp, tp",
        "'fsdp' has no whole number after the axis: write e.g. fsdp2",
        "'pp4:' has no option after the colon: write pp4",
        "'4' is no axis and degree: write e.g. dp2 or pp2,dp4",
        "'cp-1' has no whole number after the axis: write e.g. cp2",
    ]
    assert parse_messages("") == ["'' is no axis and degree: write e.g. dp2 or pp2,dp4"]
    assert parse_messages("dp2.5") == ["'dp2.5' has no whole number after the axis: write e.g. dp2"]
    with pytest.raises(UserError, match="cp=-1 is too small: use 1 or more"):
        Layout(cp=-1)


def test_the_option_of_fsdp_says_what_is_cut():
    layout = Layout.parse("fsdp8:zero1")
    assert (layout.fsdp, layout.options, layout.world_size) == (8, {"fsdp": "zero1"}, 8)
    assert str(layout) == "fsdp8:zero1"
    table = {
        "fsdp8": Placement(weights=True, gradients=True, optimizer=True),
        "fsdp8:zero2": Placement(weights=False, gradients=True, optimizer=True),
        "fsdp8:zero1": Placement(weights=False, gradients=False, optimizer=True),
        "dp8": Placement(weights=False, gradients=False, optimizer=False),
    }
    for text, placement in table.items():
        assert Layout.parse(text).placement == placement
        assert Layout.parse(f"dp2,tp2,{text}" if "fsdp" in text else f"tp2,{text}").placement == placement
    assert {None: table["fsdp8"], "zero2": table["fsdp8:zero2"], "zero1": table["fsdp8:zero1"]} == PLACEMENTS


def test_one_rank_has_nothing_to_cut():
    for text in ("fsdp1", "fsdp1:zero1", "fsdp1:zero2", "dp1", "dp4,fsdp1:zero2"):
        assert Layout.parse(text).placement == REPLICATED


def test_an_option_that_fsdp_does_not_have():
    works = "Use fsdp8:zero2 or fsdp8:zero1, or fsdp8 to cut the weights too"
    assert parse_messages("fsdp8:zero1x,tpp2") == [
        f"option 'zero1x' of fsdp does not exist. Did you mean 'zero1'? {works}",
        "axis 'tpp' does not exist. Did you mean 'tp'? Axes: pp, dp, fsdp, cp, tp",
    ]
    assert parse_messages("dp2,fsdp8:full") == [f"option 'full' of fsdp does not exist. {works}"]
    # zero3 is fsdp without an option.
    [message] = parse_messages("fsdp8:zero3")
    assert message.startswith("option 'zero3' of fsdp does not exist.")
    assert message.endswith("or fsdp8 to cut the weights too")
    with pytest.raises(UserError, match="option 'zero4' of fsdp does not exist"):
        Layout(fsdp=2, options={"fsdp": "zero4"})


def test_joint_axes():
    layout = Layout.parse("pp2,dp3,cp4")
    assert layout.size(*BATCH_AXES) == 12
    assert layout.axis_name(*BATCH_AXES) == "dp,cp"
    assert layout.axis_name("tp") == "tp"
    assert Layout().axis_name(*DATA_AXES) == "dp"


def test_every_rule_with_values_that_work():
    assert problems("pp5,cp5,tp3", world_size=75) == [
        "pp=5 is more than num_hidden_layers=4 (Layer axis): use pp=4 or less",
        "tp=3 does not divide num_attention_heads=8, and neither divides num_key_value_heads=4 nor is a "
        "multiple of it, and does not divide intermediate_size=88 (Channel axis): use tp=1, 2, 4 or 8",
    ]
    eight_heads = ModelSpec(
        vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=8
    )
    assert problems("tp3", model=eight_heads)[0] == (
        "tp=3 does not divide num_attention_heads=8, and neither divides num_key_value_heads=8 nor is a "
        "multiple of it (Channel axis): use tp=1, 2, 4 or 8"
    )
    assert problems("cp4:ulysses,tp3", model=eight_heads)[0].endswith("use tp=1 or 2")  # with 4 heads a rank
    few = eight_heads.replace({"vocab_size": 3})
    assert problems("tp4", model=few) == ["tp=4 is more than vocab_size=3 (Channel axis): use tp=1 or 2"]
    assert problems("tp4") == []  # more ranks than key/value heads: copies
    assert problems("pp2") == problems("pp4") == problems("pp2:interleaved2") == problems("pp2:zbv") == []


def test_more_stages_than_layers():
    """PP-05: never fewer layers than asked for, without a word."""
    assert problems("pp2:interleaved3") == [
        "pp=2 with 3 stages each (interleaved3) makes 6 stages, which is more than num_hidden_layers=4 "
        "(Layer axis): use pp2:1f1b, with one stage a rank"
    ]
    assert problems("pp3:zbv") == [
        "pp=3 with 2 stages each (zbv) makes 6 stages, which is more than num_hidden_layers=4 "
        "(Layer axis): use pp=2 or less"
    ]
    assert problems("pp2:bfs5") == [
        "pp=2 with 5 stages each (bfs5) makes 10 stages, which is more than num_hidden_layers=4 "
        "(Layer axis): use pp2:1f1b, with one stage a rank"
    ]
    three = TINY.replace({"num_hidden_layers": 3})
    assert problems("pp4", model=three) == [
        "pp=4 is more than num_hidden_layers=3 (Layer axis): use pp=3 or less"
    ]


def test_the_option_of_pp_is_a_schedule():
    assert str(Layout.parse("pp4:zb-h1").schedule) == "zb-h1"
    assert str(Layout.parse("pp4").schedule) == "1f1b"
    assert Layout.parse("pp2:bfs3").schedule.stages_per_rank == 3
    [message] = parse_messages("pp2:interleaved")
    assert message.startswith("option 'interleaved' of pp: schedule 'interleaved' needs a number")
    [message] = parse_messages("pp2:1f1c")
    assert "there is no schedule '1f1c'. Did you mean '1f1b'?" in message
    with pytest.raises(UserError, match="zbv takes no number"):
        Layout(pp=2, options={"pp": "zbv3"})


def test_the_batch_never_changes_silently():
    # PLAN-05
    assert problems("dp4", batch=6) == [
        "dp=4 does not divide batch=6 (Batch axis): use batch=4 or 8, or dp=1, 2, 3 or 6"
    ]
    assert problems("dp2", batch=8, microbatches=3) == [
        "dp*microbatches=2*3=6 does not divide batch=8 (Batch axis): "
        "use batch=6 or 12, or microbatches=1, 2 or 4"
    ]
    assert problems("dp2,fsdp4", batch=4) == [
        "dp*fsdp=2*4=8 does not divide batch=4 (Batch axis): use batch=8 or 16, or dp*fsdp=1, 2 or 4"
    ]
    for text in ("tp2", "pp2", "cp2"):  # these axes do not cut the batch
        assert problems(text, batch=1) == []


def test_world_size():
    assert problems("dp4,fsdp2", world_size=6) == [
        "layout dp4,fsdp2 needs 8 ranks, and there are 6: use dp3,fsdp2, or start 8 ranks"
    ]
    assert problems("tp2", world_size=1) == ["layout tp2 needs 2 ranks, and there are 1: start 2 ranks"]
    assert problems("dp4", world_size=4) == []


def test_heads_for_ulysses():
    """8 query and 4 key/value heads."""
    assert problems("cp3:ulysses") == [
        "ulysses=3 does not divide the 8 query heads of a rank, and neither divides the 4 key/value heads of "
        "a rank nor is a multiple (Sequence axis): use cp3:ring",
    ]
    assert problems("cp8:ulysses,tp2") == [
        "ulysses=8 does not divide the 4 query heads of a rank (Sequence axis): "
        "use cp8:ulysses2, cp8:ulysses4 or cp8:ring"
    ]
    assert problems("cp2:ulysses,tp8") != []
    assert parse_messages("cp2:foo") == ["option 'foo' of cp does not exist. Use cp2:ring or cp2:ulysses"]
    assert parse_messages("cp8:rings") == [
        "option 'rings' of cp does not exist. Did you mean 'ring'? "
        "Use cp8:ring, cp8:ulysses or cp8:ulysses2 for a ring of pairs"
    ]
    assert [Layout(cp=cp).ulysses(TINY) for cp in (1, 2, 3, 4, 6, 8, 12)] == [1, 1, 1, 4, 2, 4, 4]


def test_the_default_of_cp_is_written_out():
    """Ring or Ulysses, as the heads decide; what is written already stays as it is."""
    written = {
        "cp4": "cp4:ulysses4",
        "fsdp2:zero1,cp3,tp2": "fsdp2:zero1,cp3:ring,tp2",
        "cp6": "cp6:ulysses2",
        "cp4:ulysses": "cp4:ulysses",
        "dp2": "dp2",
    }
    for text, found in written.items():
        assert str(Layout.parse(text).resolved(TINY)) == found


@pytest.mark.parametrize(
    ("text", "length", "stream"),
    [
        ("dp2", 64, ""),
        ("tp2", 64, "tp=2: the residual stream is cut by tokens (sequence parallelism)"),
        ("tp2:allreduce", 64, "tp=2: every rank has the whole residual stream (as asked for)"),
        ("tp4", 62, "tp=4: every rank has the whole residual stream (tp=4 does not divide 62 tokens)"),
        ("cp2,tp4", 68, "tp=4: every rank has the whole residual stream (tp=4 does not divide 68/2 tokens)"),
    ],
)
def test_how_tp_keeps_the_stream(text: str, length: int, stream: str):
    assert Layout.parse(text).stream(length) == stream
    assert Layout.parse(text).sequence_parallel(length) == ("by tokens" in stream)


def test_all_problems_at_once():
    found = Layout.parse("dp3,tp3").problems(TINY, batch=8, microbatches=1, sequence_length=64, world_size=6)
    assert [problem.partition(" (")[0] for problem in found] == [
        "dp=3 does not divide batch=8",
        "tp=3 does not divide num_attention_heads=8, and neither divides num_key_value_heads=4 nor is a "
        "multiple of it, and does not divide intermediate_size=88",
        "layout dp3,tp3 needs 9 ranks, and there are 6: use dp2,tp3, or start 9 ranks",
    ]


def test_layouts_that_pass_can_be_built_and_advice_works():
    """Over a grid of odd sizes: no problem exactly when all rules hold, and each suggestion passes."""
    # PLAN-06
    grid = itertools.product((3, 4, 7), (6, 8), (1, 2, 3, 8), (11, 64), (1, 2, 3, 4, 6, 8))
    passed = 0
    for layers, heads, kv_heads, length, degree in grid:
        if heads % kv_heads:
            continue
        model = ModelSpec(
            vocab_size=13,
            hidden_size=24,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=4,
        )
        holds = {
            "pp": degree <= layers,
            "dp": 24 % degree == 0,
            "fsdp": 24 % degree == 0,
            "cp": True,  # sequences of any length; the heads decide between Ulysses and a ring
            "tp": heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0),
        }
        for axis, fine in holds.items():
            found = problems(f"{axis}{degree}", model=model, batch=24, sequence_length=length)
            assert (found == []) == fine, (axis, degree, found)
            passed += fine
            for message in found:
                advice = re.search(rf"use {axis}=([\d, or]+)", message)
                assert advice, message
                for value in re.findall(r"\d+", advice[1]):
                    assert problems(f"{axis}{value}", model=model, batch=24, sequence_length=length) == []
    assert passed > 200
