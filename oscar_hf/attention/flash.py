"""register_attention: transformers' registered attention functions, taught to recognize what OscarCache returns.

Nothing needs it: without it sdpa reaches the packed path through `scaled_dot_product_attention`, and flash attention gets
the dense history, dequantized on every step. With it flash attention decodes on packed data, too, its padding mask is
seen, and sdpa saves a few microseconds a layer. It changes transformers for the whole process, which is why it is asked for.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from ..errors import OscarError
from .kv_handle import Form, OscarKV
from .views import AttentionView

SDPA = "sdpa"
NAMES = (SDPA, "flash_attention_2", "flash_attention_3", "flash_attention_4")

# Arguments that ask for more than packed attention does; with any of them set the function itself must do the work.
_BEYOND = ("softcap", "s_aux", "sliding_window", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k")

# name -> (ours, what it stands in for).
_registered: dict[str, tuple[Callable, Callable]] = {}


def register_attention(names: str | Iterable[str] = NAMES) -> Callable[[], None]:
    """Wrap those of the named entries of transformers' AttentionInterface that exist.

    Calls whose keys and values are not OscarCache's pass through untouched. Calling it twice changes nothing. It holds for the
    whole process.

    Args:
        names (`str` or iterable of `str`, *optional*):
            `"sdpa"`, and functions with flash attention's masks ([B, T] or None), which may be a hub kernel's name. By default
            sdpa and flash attention 2, 3 and 4.

    Returns:
        `Callable`: A function that restores every entry, except one that somebody else has replaced since.

    Raises:
        `OscarError`: For a name that transformers does not have, and for `eager`, which is never an entry: registering one would
            replace each model's own eager attention.

    Example:

    ```python
    from oscar_hf import register_attention

    undo = register_attention()
    ```
    """
    names = [names] if isinstance(names, str) else list(names)
    if "eager" in names:
        raise OscarError(
            "eager attention cannot be registered: it is each model's own, and OscarCache reaches it as it is"
        )
    entries = AttentionInterface()
    unknown = [name for name in names if name not in NAMES and entries.get(name) is None]
    if unknown:
        raise OscarError(f"transformers has no attention named {unknown}: use {', '.join(NAMES)}, or a name it has")
    for name in names:
        function = entries.get(name)
        if function is None or function is _registered.get(name, (None,))[0]:
            continue
        ours = _wrap(function, flash=name != SDPA)
        _registered[name] = (ours, function)
        AttentionInterface.register(name, ours)
    return _unregister


def _unregister() -> None:
    entries = AttentionInterface()
    for name, (ours, original) in _registered.items():
        if entries.get(name) is ours:
            AttentionInterface.register(name, original)
    _registered.clear()


def _wrap(original: Callable, flash: bool) -> Callable:
    """`original` with packed attention in front of it; flash: its masks are [B, T] or None and causality is implied."""

    @functools.wraps(original)
    def attention(module, query, key, value, attention_mask=None, *args, **kwargs):
        ours = isinstance(key, OscarKV) and isinstance(value, OscarKV)
        output = _packed(module, query, key, value, attention_mask, kwargs, flash) if ours and not args else None
        if output is not None:
            return output.transpose(1, 2).contiguous(), None
        return original(module, query, key, value, attention_mask, *args, **kwargs)

    return attention


def _packed(
    module: Any, query: Tensor, key: OscarKV, value: OscarKV, mask: Tensor | None, options: dict, flash: bool
) -> Tensor | None:
    """Packed attention, [B, Hq, M, Dv]; None sends the call, handles and all, to the original function."""
    view, new = key.source, query.shape[2]
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    if flash:
        # The original never shows the mask and the queries to the handles, so they are shown here, whoever does the attention.
        view.observe(mask=None if mask is None else mask[:, None, None, :].bool())
        if not query.shape[1] % view.kv_heads:
            view.see_queries(query)
    # Over a prompt the view holds exact tensors: flash attention's own kernel is best, and sdpa knows its causal rule.
    plain = key.form is Form.HEADS and value.form is Form.HEADS
    if view.dense_is_free or view is not value.source or not plain:
        return None
    if options.get("dropout") or any(options.get(name) is not None for name in _BEYOND):
        return None
    if torch.is_grad_enabled() and (query.requires_grad or view.live is not None):
        return None
    if query.shape[1] % view.kv_heads:
        return None
    if flash:
        mask, causal = _flash_mask(view, mask, new, key.shape[2], causal)
    elif mask is None and new > 1:
        # sdpa counts causality from the first key, packed attention from the last: leave that to the original.
        return None
    else:
        view.observe(mask=mask)
        view.see_queries(query)
        causal = False
    return view.attend(query, mask, causal, options.get("scaling"), key.repeat)


def _flash_mask(
    view: AttentionView, mask: Tensor | None, new: int, total: int, causal: bool
) -> tuple[Tensor | None, bool]:
    """(mask [B, 1, 1|M, total] or None, is_causal) for a padding mask [B, T] of flash attention, True or 1 = attend."""
    causal = causal and new > 1
    if mask is None:
        return None, causal
    return view.ask(mask, ("flash", new, total, causal), lambda: _expanded(mask, new, total, causal)), False


def _expanded(mask: Tensor, new: int, total: int, causal: bool) -> Tensor:
    """A padding mask [B, T] as packed attention takes it. One that is shorter than `total` ends at the last token: what a
    fixed-size cache has beyond is hidden."""
    length = mask.shape[1]
    expanded = torch.nn.functional.pad(mask.bool(), (0, max(0, total - length)))[:, None, None, :]
    if causal:
        own = torch.arange(length - new, length, device=mask.device)
        expanded = expanded & (torch.arange(expanded.shape[-1], device=mask.device) <= own[:, None])
    return expanded
