"""Kernels compile for GPUs that are not here; `tests/compile_kernels.py` compiles more of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oscar_hf.kernels.launch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def compiled(*arguments):
    """The status and the lines of one run; a process of its own, since kernels are interpreted in this one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", *arguments],
        cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True,
    )  # fmt: skip


def test_prompts_of_the_default_rule_fit_the_smallest_shared_memory():
    """Head dims 64 to 256, with the 99 KiB of GPUs for desktops."""
    done = compiled("--arch", "86", "append feedback", "1000 tokens")
    assert done.returncode == 0 and "4 kernels" in done.stdout and " 0 failures" in done.stdout, (
        done.stdout + done.stderr
    )


def test_a_step_compiles():
    done = compiled("step keys unbiased values unbiased D 64")
    assert done.returncode == 0 and "1 kernels" in done.stdout, done.stdout + done.stderr
