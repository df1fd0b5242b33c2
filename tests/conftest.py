"""Set-up that must come before any test imports the package."""

import os

import pytest
import torch

# Without a GPU the Triton kernels run in Triton's interpreter; the variable is read when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# Workers side by side share the cores: more threads than that wait for each other, and tests take many times as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Skip GPU tests, with the reason, where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
