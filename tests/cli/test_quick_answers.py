"""What answers before a device is rented takes a second, start-up included: so much work, and no more.

Counted, not timed: functions that Python calls, a third of a microsecond each with what they do.
"""

import subprocess
import sys

import pytest

_COUNTED = """
import sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
from fourfold.cli import app
app(sys.argv[1:], standalone_mode=False)
sys.setprofile(None)
loaded = {"torch", "matplotlib", "rich", "transformers", "pyarrow"} & set(sys.modules)
print(calls, *loaded, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("explain --model llama3-405b --batch 2048 --layout pp16,fsdp128,tp8", 2_000_000),
        ("plan --model llama3-70b --batch 128 --gpus 64xH100-80GB", 1_200_000),
    ],
)
def test_the_work_of_an_answer(words: str, most: int) -> None:
    command = [sys.executable, "-c", _COUNTED, *words.split(), "--sequence", "8192"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    calls, *loaded = done.stderr.split()
    assert loaded == []
    assert int(calls) <= most
