"""Which of three ways attends over a store: the fused decode kernel, block by block through flash attention, or the plain
PyTorch of `packed`."""

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ..dtypes import keeps_dtypes
from ..kernels.decode import MAX_NEW_TOKENS, DecodeStore, decode_attention, decode_problem, mask_facts
from ..kernels.launch import launch_problem, warn_once
from ..masks import is_causal as is_causal_mask
from ..masks import leading_hidden
from ..storage.layer_store import LayerStore
from .blockwise import prefill_attention, prefill_problem
from .packed import packed_attention

# Asks a question about a mask: (mask, question, answer) to what the answer gives, see masks.MaskMemory.
Ask = Callable[[Tensor, Hashable, Callable[[], Any]], Any]

# New tokens from which flash attention on dequantized blocks beats the plain path, by device: on CPUs a block must pay
# for itself, and on GPUs the decode kernel takes few tokens.
_MIN_PREFILL = {"cpu": 64, "cuda": 2}


def ask_anew(mask: Tensor, question: Hashable, answer: Callable[[], Any]) -> Any:
    """Ask without a memory."""
    return answer()


def attend(
    store: LayerStore,
    query: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    new_tokens: int,
    ask: Ask = ask_anew,
) -> Tensor:
    """`packed_attention` by the fastest way that can take the call.

    new_tokens: tokens that the call added; a query of one token per head may come packed as [B, Hkv, g, D]. ask: where answers
    about the mask are remembered.
    """
    # A prompt on top of a history goes block by block: the kernel reads few, placed tokens only.
    if store.waiting is None and new_tokens <= MAX_NEW_TOKENS and query.device.type == "cuda":
        rows, decode_store = one_row_per_token(query, new_tokens), store.decode_store()
        problem = _fused_problem(rows, decode_store, mask, is_causal, new_tokens, ask)
        if not problem:
            return _fused(rows, decode_store, mask, scale, new_tokens, ask).reshape(*query.shape[:3], -1)
        warn_once(problem)
    if _takes_prefill(store, query, mask, is_causal, new_tokens, ask):
        return _prefill(store, query, scale)
    return packed_attention(store, query, mask, is_causal, scale)


def one_row_per_token(query: Tensor, new_tokens: int) -> Tensor:
    """A query [B, Hq, M, D] of `new_tokens` tokens; one token's may come packed as [B, Hkv, g, D]."""
    if new_tokens == 1 and query.shape[2] > 1:
        return query.reshape(query.shape[0], query.shape[1] * query.shape[2], 1, query.shape[3])
    return query


def _fused(
    query: Tensor, store: DecodeStore, mask: Tensor | None, scale: float | None, new_tokens: int, ask: Ask
) -> Tensor:
    facts = None
    if mask is not None:
        question = ("facts", new_tokens, store.length)
        facts = ask(mask, question, lambda: mask_facts(mask, store.length, new_tokens))
    return decode_attention(query, store, mask=mask, mask_facts=facts, scale=scale)


def _fused_problem(
    query: Tensor, store: DecodeStore, mask: Tensor | None, is_causal: bool, new_tokens: int, ask: Ask
) -> str:
    """Why the fused kernel cannot take this call, or an empty string."""
    problem, dtype = launch_problem(query.device), store.keys.sink.dtype
    if problem:
        return problem
    if query.dtype != dtype:
        return f"the decode kernel takes queries of the cache's dtype {dtype}, got {query.dtype}"
    if query.shape[2] != new_tokens:
        return f"the decode kernel takes one query per new token ({new_tokens}), got {query.shape[2]}"
    if mask is not None and mask.shape[3] < store.length:
        return f"the decode kernel takes masks over all {store.length} slots, got {list(mask.shape)}"
    if mask is not None and query.shape[2] == 1 and (mask.shape[1] not in (1, query.shape[1]) or mask.shape[2] != 1):
        return f"the decode kernel takes no mask of shape {list(mask.shape)} for one new token"
    if new_tokens > 1:
        if mask is not None:
            is_causal = ask(mask, ("causal", new_tokens), lambda: is_causal_mask(mask, new_tokens))
        if not is_causal:
            return "the decode kernel takes causal attention among the new tokens only"
    return decode_problem(query, store)


def _takes_prefill(
    store: LayerStore, query: Tensor, mask: Tensor | None, is_causal: bool, new_tokens: int, ask: Ask
) -> bool:
    """Whether a call is many new tokens that see every slot but padding and what comes after them, so `_prefill` can do it."""
    least = _MIN_PREFILL.get(query.device.type)
    if least is None or new_tokens < least or query.shape[2] != new_tokens or prefill_problem(store, query):
        return False
    if mask is None:
        return is_causal
    total = store.held
    hidden = ask(mask, ("leading", new_tokens, total), lambda: leading_hidden(mask, new_tokens, total))
    if hidden is None:
        return False
    return (hidden * store.batch_size if len(hidden) == 1 else hidden) == store.padding.starts(store.batch_size)


@keeps_dtypes
def _prefill(store: LayerStore, query: Tensor, scale: float | None) -> Tensor:
    return prefill_attention(store, query, scale)
