"""deferred_stop: let generate() learn one step late whether it is done. It changes transformers for the whole process.

The state of that change, how many blocks are open and what transformers' own answer was, is here and nowhere else.
"""

import contextlib
import threading
import warnings
from collections.abc import Iterator

import torch
import transformers
from transformers import EncoderDecoderCache
from transformers.generation import utils as generation_utils

from ..errors import OscarError

# Name of the class by which generate() defers its question whether it is done; transformers has it from 5.17 on.
_DEFERRED = "DeferredStopCheck"
_deferring = threading.Lock()
# How many blocks of `deferred_stop` are open, and what transformers' own answer is while there are any.
_deferred_blocks, _plain_is_supported = 0, None


@contextlib.contextmanager
def deferred_stop() -> Iterator[None]:
    """Let generate() learn one step late whether it is done, so that it prepares a step while the GPU runs the one before.

    transformers works that way by itself on Apple's GPUs, and only with a cache that can be cropped, since the step that
    was one too many is taken back. The same tokens come out and the cache ends at the same length; what stays of that
    step is that one more token may have been packed, and a random number drawn. This context asks for it on every
    device that works beside the host; on a CPU it changes nothing.

    Blocks may be nested and may overlap: until the last open one ends, the change holds for every generate() of the
    process.

    Returns:
        `ContextManager[None]`: Leaving it puts transformers' own behavior back.

    Raises:
        `OscarError`: If transformers is older than 5.17.

    Example:

    ```python
    from oscar_hf import OscarCache, deferred_stop

    cache = OscarCache(model.config, recipe="hadamard", max_cache_len=4096)
    with deferred_stop():
        model.generate(**inputs, past_key_values=cache, max_new_tokens=100)
    ```
    """
    global _deferred_blocks, _plain_is_supported
    check = getattr(generation_utils, _DEFERRED, None)
    if check is None:
        raise OscarError(
            f"deferred_stop needs transformers 5.17 or later, got {transformers.__version__}: update it, or leave deferred_stop out"
        )
    with _deferring:
        if not _deferred_blocks:
            _plain_is_supported = check.is_supported
            check.is_supported = staticmethod(_is_supported_beside_host)
        _deferred_blocks += 1
    try:
        yield
    finally:
        with _deferring:
            _deferred_blocks -= 1
            if not _deferred_blocks:
                check.is_supported = staticmethod(_plain_is_supported)


def stop_is_deferred() -> bool:
    """Whether a block of `deferred_stop` is open."""
    return _deferred_blocks > 0


def can_defer_stop(cache, device: torch.device) -> bool:
    """Whether `deferred_stop` makes a difference for a cache that is passed to generate()."""
    is_ours = not isinstance(cache, EncoderDecoderCache)
    return hasattr(generation_utils, _DEFERRED) and _works_beside_host(device) and is_ours and cache.is_croppable


def _is_supported_beside_host(device, cache, cache_is_returned, is_assistant):
    # transformers' crop of a pair of caches knows its own classes only.
    if not _works_beside_host(device) or (isinstance(cache, EncoderDecoderCache) and cache_is_returned):
        return _plain_is_supported(device, cache, cache_is_returned, is_assistant)
    supported = _plain_is_supported(torch.device("mps"), cache, cache_is_returned, is_assistant)
    if not supported and not is_assistant:
        warnings.warn(
            f"oscar_hf: deferred_stop changes nothing for this {type(cache).__name__}, which cannot be cropped: leave it out, or "
            "use a growing cache if the model has sliding layers",
            stacklevel=2,
        )
    return supported


def _works_beside_host(device: torch.device) -> bool:
    return device.type != "cpu"
