"""What forwards leave behind, read from the order."""

from fourfold.program import Program
from fourfold.program.liveness import Block, left_behind, peak_bytes
from tests.programs import parsed


def words(actions: frozenset[object]) -> set[str]:
    return {str(action) for action in actions}


def test_without_recomputation_every_forward_leaves_its_tape() -> None:
    left = left_behind(parsed("0F0 1F0 1B0 0B0"))
    assert (words(left.tapes), words(left.inputs), words(left.outputs)) == ({"0F0", "1F0"}, set(), {"0F0"})


def test_the_last_forward_leaves_the_tape_and_the_others_an_input() -> None:
    """1F0 runs from an input that 0R0 makes anew; what 0F0 starts from stays for both that come later."""
    left = left_behind(parsed("0F0 1F0 2F0 2B0 0R0 1R0 1B0 0R0.1 0B0"))
    assert words(left.tapes) == {"2F0", "1R0", "0R0.1"}
    assert words(left.inputs) == {"0F0", "0R0"}
    assert words(left.outputs) == {"0F0", "1F0", "0R0"}


def test_what_is_sent_is_an_output() -> None:
    left = left_behind(parsed("0F0 0SEND_F0 0R0 0I0 0W0"))
    assert words(left.outputs) == {"0F0"}
    assert words(left.tapes) == {"0R0"}


def test_the_most_bytes_of_inputs_and_tapes() -> None:
    """Inputs of 1, 2, 4 and tapes of 10, 20, 40. With full: 1 + 2 + 40; without: 10 + 20 + 40."""
    texts = {"0F0 1F0 2F0 2B0 1R0 1B0 0R0 0B0": 43, "0F0 1F0 2F0 2B0 1B0 0B0": 70}
    for text, expected in texts.items():
        program = Program((parsed(text),), (0, 0, 0), 1, ())
        assert peak_bytes(program, [Block(1.0, 1, 10), Block(1.0, 2, 20), Block(1.0, 4, 40)]) == [expected]


def test_a_weight_gradient_needs_only_a_part_of_the_tape() -> None:
    """Tapes of 10, of which 7 stay after the input gradient."""
    program = Program((parsed("0F0 0I0 0F1 0I1 0W0 0W1"),), (0,), 2, ())
    assert peak_bytes(program, [Block(1.0, 1, 10, 7)]) == [17]
    program = Program((parsed("0F0 0I0 0F1 0W0 0I1 0W1"),), (0,), 2, ())
    assert peak_bytes(program, [Block(1.0, 1, 4, 7)]) == [11], "which may be more than the tape"


def test_what_a_forward_without_a_tape_keeps_becomes_part_of_the_tape() -> None:
    """Inputs of 1, kept results of 3, tapes of 10: all are kept until each is computed again."""
    program = Program((parsed("0F0 1F0 1R0 1B0 0R0 0B0"),), (0, 0), 1, ())
    assert peak_bytes(program, [Block(1.0, 1, 10, 0, 3)] * 2) == [1 + 3 + 10]
