"""What the Triton kernels share: the optional import, whether a kernel can run, the warning when it cannot."""

import contextlib
import functools
import os
import re
import warnings

import torch

MIN_TRITON = (3, 4)
# Earlier ones want 16 columns in a matrix product and know no launch that waits for the one before it.
DECODE_MIN_TRITON = (3, 5)
MIN_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 256

try:
    import triton
    import triton.language as tl
    from triton.language.extra import cuda as tlx
except ImportError:

    class _Missing:
        """Stands in for triton, tl and tlx where the kernels are defined, so that the package imports without Triton."""

        @staticmethod
        def constexpr(value):
            """Leave the constant what it is."""
            return value

        @staticmethod
        def jit(function=None, **_):
            """Leave the kernel an ordinary function; nothing calls it."""
            return function if function is not None else lambda later: later

    triton = tl = tlx = _Missing()

HAS_TRITON = type(triton).__name__ != "_Missing"
_given_warnings: set[str] = set()


def interpreting() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1), which also takes CPU tensors."""
    return HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


def triton_problem(minimum: tuple[int, int] = MIN_TRITON) -> str:
    """Why the installed Triton cannot be used, or an empty string."""
    if not HAS_TRITON:
        return "Triton is not installed"
    # Development builds carry suffixes such as 3.6.0+git1234.
    version = re.match(r"(\d+)\.(\d+)", triton.__version__)
    if version is None or tuple(map(int, version.groups())) < minimum:
        return f"Triton {triton.__version__} is older than {minimum[0]}.{minimum[1]}"
    return ""


@functools.cache
def _cuda_problem(index: int) -> str:
    problem = triton_problem()
    # ROCm also calls its devices cuda; its capability numbers mean something else.
    if not problem and torch.version.hip is None and torch.cuda.get_device_capability(index) < MIN_CAPABILITY:
        problem = f"the GPU's compute capability is below {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    return problem


def launch_problem(device: torch.device) -> str:
    """Why Triton kernels cannot be compiled for or launched on `device`, or an empty string."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}, and the Triton kernels are for CUDA GPUs"
    return _cuda_problem(torch.cuda.current_device() if device.index is None else device.index)


def head_dim_problem(head_dim: int) -> str:
    """Why the kernels cannot handle this head dim, or an empty string."""
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        return f"the kernels need a head dim that is a multiple of 8 and at most {MAX_HEAD_DIM}, got {head_dim}"
    return ""


def warn_once(reason: str) -> None:
    """Say once per process and reason that the plain PyTorch path runs on a GPU, and why."""
    if reason not in _given_warnings:
        _given_warnings.add(reason)
        warnings.warn(f"oscar_hf runs its slower PyTorch path instead of a Triton kernel: {reason}", stacklevel=3)


def fall_back(device: torch.device, reason: str) -> None:
    """Note that the PyTorch reference runs instead of a kernel: silent on the CPU, one warning on a GPU."""
    if device.type not in ("cpu", "meta"):
        warn_once(reason)


def on_device(device: torch.device):
    """Context in which a launch goes to `device`: Triton launches on the current device, not on the tensors' own."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def next_power_of_two(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
