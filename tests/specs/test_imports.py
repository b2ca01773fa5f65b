"""Specs and FLOPs are for planning anywhere: they import no torch."""

import subprocess
import sys


def test_no_torch():
    modules = "fourfold.specs, fourfold.flops, fourfold.learning_rate"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
