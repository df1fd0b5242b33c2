"""Block sizes and splits of a call, and the rule by which a history is split, on the host and on the device."""

import dataclasses
import functools

import torch
from torch import Tensor

from ...quantization.packed_rows import PAIRED_HEAD_DIM
from ..launch import interpreting, next_power_of_two, tl, triton
from .store import DecodeStore


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Block sizes and splits of one call; `choose_tuning` picks them from shape and device."""

    columns: int  # query rows (heads x new tokens) per program
    tiles: int  # tiles of tokens that share the score columns: 1 or 2
    block: int  # tokens per tile
    warps: int
    stages: int
    splits: int  # history splits per KV head at most
    merge_columns: int  # columns per merge program
    merge_parts: int  # parts it weighs at a time
    pdl: bool  # programmatic dependent launch (Hopper and later): a launch starts while the one before it drains
    asm: bool
    registers: int | None = None
    window: int = 64  # sink or ring entries per window split
    window_block: int = 16
    ahead: int = 256  # tokens fetched to L2 before the queries are ready
    merge_slice: int = 32  # output channels per merge program
    merge_warps: int = 4
    prepare_slice: int = 32
    prepare_warps: int = 4
    together: bool = True  # programs take a window piece and a history split; else one or the other
    alone: bool = False  # a last, partial block is a split of its own
    prepare_rows: int = 1  # batch rows per prepare program
    merge_rows: int = 1  # batch rows per merge program
    own_shifts: bool = True  # a split program multiplies its blocks' centers itself; else programs of prepare do

    @property
    def tokens(self) -> int:
        """Tokens per block of a program."""
        return self.warps * self.tiles * self.block

    @property
    def longest(self) -> int:
        """Blocks per split at most: matrix units truncate what they accumulate, and 256 steps cost 1e-5 of the sum.

        The output is hundreds of times smaller than that sum where a long history averages many values.
        """
        return max(1, 4096 // self.block)


def splits_in_use(history: int, tuning: Tuning) -> int:
    """History splits that a row without padding uses; `history_splits` is the same rule on the device."""
    block = tuning.tokens
    rest = int(tuning.alone and history % block > 0)
    body = -(-history // block) - rest
    share = max(min(-(-body // tuning.splits), tuning.longest), 1)
    return rest + -(-body // share)


@triton.jit
def history_splits(h, low, limit, longest, alone, block):
    """First block, whole splits' blocks in all and each, splits. `splits_in_use` is the same rule on the host.

    limit: splits at most, unless they would pass `longest` blocks
    alone: 1 if a last, partial block is a split of its own. It runs through code of its own, which nothing has fetched
    yet, so that at the end of a short split it would take as long as three blocks.
    """
    skipped = low // block
    todo = tl.maximum((h + block - 1) // block - skipped, 0)
    rest = tl.where(h % block > 0, tl.minimum(alone, todo), 0)
    body = todo - rest
    share = tl.maximum(tl.minimum((body + limit - 1) // limit, longest), 1)
    return skipped, body, share, (body + share - 1) // share + rest


@functools.cache
def _device_facts(index: int) -> tuple[int, bool]:
    """Multiprocessors, and whether launches may overlap."""
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.major >= 9 and torch.version.hip is None


def choose_tuning(query: Tensor, store: DecodeStore) -> Tuning:
    """Tuned on an H200; the reasons are in the comments, so that another device can be reasoned about."""
    batch, heads, new, head_dim = query.shape
    kv_heads = store.keys.rows.codes.shape[1]
    cols = heads // kv_heads * new
    # Two tiles share 8 columns where at most 4 are needed. At D = 64 a row of words is two tokens, so always two tiles.
    tiles = 2 if head_dim == PAIRED_HEAD_DIM or (cols <= 4 and head_dim == 128) else 1
    columns = min(16 if head_dim == 128 else 8, max(next_power_of_two(cols), 4 if tiles == 2 else 8))
    on_cpu = query.device.type != "cuda"
    # The interpreter: enough splits to test their merging, otherwise few programs, each of which is slow.
    sms, pdl = (4, False) if on_cpu else _device_facts(query.device.index)
    programs = batch * kv_heads * -(-cols // columns)
    # With few heads a program runs few blocks, and the time goes into the first of them: code that nothing has fetched
    # yet and loads that nothing hides. Short blocks are half the code; with many blocks they cost 5% more a token.
    few = programs <= sms // 8
    # Accumulators take head_dim * columns * tiles / 32 registers of each thread: shorter tiles where those are many.
    small = head_dim * columns * (tiles if head_dim == 128 else 1) <= 1024
    resident = 12 if head_dim * columns <= 1024 and not (tiles == 2 and head_dim == 128) else 8
    # One wave of programs: what does not fit starts when the others are done. At batch 1 a split is as short as two
    # blocks; hundreds of parts still merge in one pass.
    splits = sms * resident // programs
    if few:
        # Windows take longer than the wait for the queries there, so they get programs of their own.
        window = 64
        splits -= sum(-(-x.shape[2] // window) for x in (store.keys.sink, store.keys.ring))
    else:
        # A program takes a piece while it waits for the queries, the smaller the more programs share them.
        window = 16 if splits >= 8 else 64
    splits = max(1, min(splits, 256))
    # Rotating and merging go by 16 rows through the matrix units where programs would come in several waves otherwise,
    # rotating also where plain sums would run out of registers. (With more parts than one pass takes, merging that way is
    # slower than any other: 50 us at batch 8.)
    rows = max(1, 16 // columns)
    tokens = store.keys.rows.scale.shape[2] if isinstance(store.history, Tensor) else store.history
    by16 = programs >= sms and max(splits, -(-tokens // (4096 * tiles))) <= 512 // head_dim
    if on_cpu:
        merge = dict(merge_columns=min(4, columns), merge_parts=16, merge_slice=head_dim // 2)
    elif by16:
        merge = dict(merge_columns=columns, merge_parts=max(2, 256 // head_dim), merge_slice=32, merge_rows=rows)
    elif splits > 32 and batch * heads * new <= sms:
        merge = dict(merge_columns=1, merge_parts=min(128, 16384 // head_dim), merge_slice=32)
    else:
        parts = 32 if splits > 32 and head_dim < 256 else 16
        merge = dict(merge_columns=2, merge_parts=parts, merge_slice=min(8192 // head_dim, head_dim))
    block = 64 if small and not few else 32
    if store.keys.center_block:
        # A block of tokens has one center.
        block = min(block, store.keys.center_block // tiles)
    return Tuning(
        columns=columns, tiles=tiles, block=block, warps=1, stages=3, splits=splits,
        # Fetching further ahead than the wait for the queries delays the first loads.
        window=window, together=not few, alone=few, ahead=128 if few else 256,
        # Extra programs of prepare hide where few others run, and at D = 256, whose split programs are short of registers.
        own_shifts=not few and head_dim < 256,
        prepare_rows=rows if programs >= sms or head_dim * columns >= 1024 else 1,
        prepare_slice=head_dim // 2 if on_cpu else 32,
        pdl=pdl, asm=not interpreting() and torch.version.hip is None, **merge,
    )  # fmt: skip
