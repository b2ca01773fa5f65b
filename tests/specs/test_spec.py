"""What all specs share."""

import pytest

from fourfold.specs.spec import divisors


@pytest.mark.parametrize("number", [1, 2, 9, 12, 97, 360, 2**10 * 3**5])
def test_divisors(number: int):
    assert divisors(number) == [value for value in range(1, number + 1) if number % value == 0]


def test_divisors_of_a_number_too_large_to_try_all():
    assert divisors(2_000_000_001) == [1, 3, 666_666_667, 2_000_000_001]
    assert divisors(2**61 - 1) == [1, 2**61 - 1]
