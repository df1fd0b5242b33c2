"""Timing on a CUDA GPU, and the description of the machine that every result carries."""

import datetime
import platform
import statistics
from collections.abc import Callable

import torch
import transformers

import oscar_hf

from ..errors import OscarError
from ..kernels.launch import HAS_TRITON, triton

# Several times the L2 cache of the largest GPUs: buffers used in turn are never found in it.
ROTATE_BYTES = 200_000_000


def require_cuda(device: str | None) -> torch.device:
    """The CUDA device to bench on; OscarError where there is none."""
    if not torch.cuda.is_available():
        raise OscarError("oscar-hf bench needs a CUDA GPU: none is visible to torch")
    chosen = torch.device(device or "cuda")
    if chosen.type != "cuda":
        raise OscarError(f"oscar-hf bench needs a CUDA GPU: got --device {device}")
    chosen = torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)
    torch.cuda.set_device(chosen)
    return chosen


def machine(device: torch.device | None = None) -> dict[str, str | float | None]:
    """GPU (of the device that is current, or `device`), versions and date."""
    cuda = torch.cuda.is_available() and (device is None or device.type == "cuda")
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return {
        "gpu": properties.name if cuda else "none",
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1) if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__ if HAS_TRITON else "none",
        "transformers": transformers.__version__,
        "oscar_hf": oscar_hf.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def graph_microseconds(functions: list[Callable], repeats: int = 9) -> float:
    """Median microseconds per function of one CUDA graph that runs all of them, each on buffers of its own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for function in functions:
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [function() for function in functions]

    def replay(count):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / count / len(functions)

    replay(3)
    count = max(1, int(2000 / max(replay(2) * len(functions), 1e-3)))
    median = statistics.median(replay(count) for _ in range(repeats))
    del kept
    return median


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes counted."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    # A kernel, not `copy_`: that becomes a copy node of the graph, which does not reach the memory's speed.
    microseconds = graph_microseconds([lambda: torch.add(source, 1.0, out=target)])
    return 2 * source.nbytes / microseconds * 1e6
