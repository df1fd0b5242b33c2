"""What decode attention reads of a layer, and which calls it takes."""

import dataclasses

from torch import Tensor

from ...quantization.kv_side import Side
from ..launch import DECODE_MIN_TRITON, HAS_TRITON, interpreting, triton_problem

MAX_NEW_TOKENS = 16
# A block of tokens that the kernel takes at once lies in one block that has a center.
MIN_CENTER_BLOCK = 32


@dataclasses.dataclass
class DecodeStore:
    """One layer's cache as `decode_attention` reads it.

    keys, values: the two sides, both symmetric or both not, with windows; keys with or without centers of blocks, in whose place
    they may have a mean; length: slots in use, new tokens of the call included;
    history: how many are quantized (slots S..S+history-1 with S the size of the sink). Both are ints, or both int32 tensors of
    one element on the device. start: int32 [B] first real slot of each row (left padding), or None for zeros.
    """

    keys: Side
    values: Side
    length: int | Tensor
    history: int | Tensor
    start: Tensor | None = None


def decode_problem(query: Tensor, store: DecodeStore) -> str:
    """Why the fused kernel cannot take this call, or an empty string."""
    # Triton's interpreter runs the kernels in any version.
    if HAS_TRITON and not interpreting() and (problem := triton_problem(DECODE_MIN_TRITON)):
        return f"the decode kernel needs a newer Triton: {problem}"
    head_dim, groups = query.shape[-1], store.keys.rows.scale.shape[-1]
    if head_dim not in (64, 128, 256):
        return f"the decode kernel takes head dims 64, 128 and 256, got {head_dim}"
    if store.values.sink.shape[-1] != head_dim:
        return (
            f"the decode kernel takes keys and values of one head dim, got {head_dim} and {store.values.sink.shape[-1]}"
        )
    if query.shape[2] > MAX_NEW_TOKENS:
        return f"the decode kernel takes at most {MAX_NEW_TOKENS} new tokens, got {query.shape[2]}"
    if groups not in (1, 2, 4) or store.values.rows.scale.shape[-1] != groups:
        return f"the decode kernel takes 1, 2 or 4 groups per row, keys and values alike, got {groups}"
    if (store.keys.rows.min is None) != (store.values.rows.min is None):
        return "the decode kernel takes keys and values both with or both without min"
    block = store.keys.center_block
    if block and (block < MIN_CENTER_BLOCK or block & (block - 1)):
        return (
            f"the decode kernel takes keys centered by blocks of a power of two tokens, at least {MIN_CENTER_BLOCK}, "
            f"got {block}"
        )
    return ""
