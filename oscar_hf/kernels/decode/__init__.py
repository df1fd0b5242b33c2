"""Decode attention straight from 2-bit codes: split-KV over history, merged with the exact windows, in three launches.

    prepare   per KV head and slice of channels: q @ KQ in fp32, rounded once to fp16, stored as matrix-unit operands
    split     one warp per KV head and split: reads codes; also, or alone, a piece of the sink or of the ring
    merge     weighs the partial results, rotates the history's share back with VI, adds the windows' share

How many splits there are follows on the device from the history (`history_splits`), so that room for more costs nothing.
What keeps the split kernel short (at batch 1 code that nothing has fetched yet and a lone warp's latencies bind it, at
batch 8 and 32 memory does):

* A crumb is an fp16 subnormal where it lies: `word & 0x0300` *is* the number 4^4 code 2^-24, and matrix units take
  subnormals at full speed. So a code costs one `and` per pair; crumbs 5-7 share one shift by 10. The powers of four are
  folded into the query's planes (keys) and into the final store (values), all exact.
* q.khat = scale (q.code) + min sum(q): scale and min are applied to scores and to probabilities, never to elements.
* Tokens lie on the matrix unit's M axis, query heads on N = 8. With at most 4 query rows per KV head two tiles of
  tokens share the 8 columns: the left tile meets [q | 0], the right one [0 | q], so no lane computes softmax for padding.
* The running maximum is lazy: a block is exponentiated against the old reference, and only when its row sums pass
  `LIMIT` is the reference raised and everything rescaled. Results do not depend on when that happens, up to rounding.
* Keys are stored without the center of their block (`block_shifts`): q.center, one number per block of 128 tokens and query,
  joins the scores where a mean of all keys would. It needs no rotation, so the wait for the rotated queries hides it.
* Bounds, padding and masks cost only the blocks where they bite: whole, visible blocks run in a loop that knows of none.

`reference.decode_attention_reference` specifies it all in plain PyTorch. `attend` launches the three kernels, each in a file of
its name; `split` is made of `split_history` and `split_windows`, `elements` is what they share, and `tuning` picks the sizes.
"""

from .attend import decode_attention
from .mask_facts import mask_facts
from .store import MAX_NEW_TOKENS, DecodeStore, decode_problem
from .tuning import Tuning, splits_in_use

__all__ = [
    "MAX_NEW_TOKENS",
    "DecodeStore",
    "Tuning",
    "decode_attention",
    "decode_problem",
    "mask_facts",
    "splits_in_use",
]
