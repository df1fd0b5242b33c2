"""Device: time and memory of the device that a model is on; attempt: a run whose failure is a row of the table, not the end."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

OUT_OF_MEMORY = "out of memory"


class Device:
    """Clock and memory of one device. A CPU has no figures of memory (None), so that all else can be tried without a GPU."""

    def __init__(self, device: torch.device):
        self.device, self.is_cuda = device, device.type == "cuda"

    def now(self) -> float:
        """Seconds, once everything asked of the device is done."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def allocated(self) -> int | None:
        """Bytes in use."""
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else None

    def reset_peak(self) -> None:
        """Count the peak from here on."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int | None:
        """Most bytes in use since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_cuda else None

    def clear(self) -> None:
        """Give back GPU memory that nothing refers to, cycles included."""
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()


def gib_since(before: int | None, now: int | None) -> float | None:
    """GiB between two figures of a Device; None where it has none."""
    return None if before is None or now is None else (now - before) / 2**30


def problem_of(error: Exception) -> str:
    """An error in one line; every kind of lack of memory reads OUT_OF_MEMORY."""
    text = str(error).strip()
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower() or "ALLOC_FAILED" in text:
        return OUT_OF_MEMORY
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


def attempt(device: Device, function: Callable, *args, **kwargs) -> tuple[Any, str]:
    """(result, "") or (None, what went wrong); either way, what the run used and nothing refers to is given back."""
    result, problem = None, ""
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        # Only the text is kept: the traceback's frames would hold the tensors of the failed run.
        problem = problem_of(error)
    device.clear()
    return result, problem


def failed(row: dict) -> bool:
    """Whether something other than a lack of memory, which is a result, stopped a row."""
    return bool(row.get("problem")) and row["problem"] != OUT_OF_MEMORY
