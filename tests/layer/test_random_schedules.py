"""Whatever order meets the dependencies runs; whatever has a fault is refused."""

import pytest
from hypothesis import given, settings

from fourfold.errors import UserError
from fourfold.layer.transfers import with_transfers
from fourfold.program import COMPUTE, Program, check, clock
from tests.layer.random_schedules import (
    broken_schedules,
    can_run,
    reordered_schedules,
    right_schedules,
)


@settings(max_examples=150, deadline=None)
@given(right_schedules())
def test_a_right_schedule_never_deadlocks(program: Program) -> None:
    check(program)
    with_messages = with_transfers(program)
    check(with_messages)
    for rendezvous in (False, True):
        timeline = clock(with_messages, rendezvous=rendezvous)
        assert not timeline.stuck
        ran = [span.action for span in timeline.spans if span.action.kind in COMPUTE]
        assert len(ran) == sum(len(actions) for actions in program.ranks)


@settings(max_examples=200, deadline=None)
@given(broken_schedules())
def test_a_broken_schedule_is_refused(broken: tuple[str, Program]) -> None:
    fault, program = broken
    with pytest.raises(UserError) as error:
        check(program)
    assert all(error.value.messages), fault


@settings(max_examples=150, deadline=None)
@given(reordered_schedules())
def test_another_order_is_refused_exactly_if_it_cannot_run(program: Program) -> None:
    """Among these are circles of ranks that wait for each other."""
    if can_run(program):
        check(program)
        check(with_transfers(program))
    else:
        with pytest.raises(UserError, match="can never start"):
            check(program)
