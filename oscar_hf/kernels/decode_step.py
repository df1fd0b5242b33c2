"""Step: everything that a decode step writes to one layer, keys and values, in one launch.

The tokens that fall out of the recent window are centered, rotated, quantized and packed as `append` does it; then the new
tokens take their places in the sink or in the ring. Lengths are Python ints, or live on the device where a compiled model
must not depend on them. There the token that the next step will pack can be encoded ahead, beside other work: most of a step's
time is one token's search for its scale.
"""

import torch
from torch import Tensor

from ..quantization.block_centers import open_blocks
from ..quantization.kv_side import Side
from ..quantization.packed_rows import tokens_per_row
from .append import append_rows_reference
from .encode import center_rows, encode, encode_plan, encode_problem, matrix_strides, rotate
from .launch import launch_problem, next_power_of_two, on_device, tl, triton
from .scale_search import round_to_fp16

# Slots of a layer's counters on the device, int32: tokens held, tokens packed, programs that have finished (0 between
# launches), 1 once a step did not fit, and tokens whose codes are already there (counts where it is more than HISTORY).
LENGTH, HISTORY, TICKET, OVERFLOW, AHEAD = range(5)
COUNTERS = 5


def packed_after(length: int, history: int, sink: int, recent: int) -> int:
    """How many tokens are packed after a step on `length` tokens: all but the sink and the last recent - 1 before it."""
    return max(history, length - sink - recent + 1)


def place_tokens_reference(
    keys: Side,
    values: Side,
    new_keys: Tensor,
    new_values: Tensor,
    lengths: tuple[int, int] | Tensor,
    recent: int,
    start: Tensor | None = None,
    limit: int | None = None,
) -> tuple[int, int] | Tensor:
    """Place new tokens [B, H, M, D] in a layer that holds at least the window's and M - recent more slots in its ring.

    lengths: (tokens, packed tokens) before the step, or int32 [COUNTERS] on the device, which is updated in place.
    recent: the window, the last new token included; start: int32 [B] first real slot of each row, None for zeros; limit:
    tokens that fit. A step that does not fit writes nothing and sets OVERFLOW. Returns the new lengths.
    """
    counters = lengths if isinstance(lengths, Tensor) else None
    length, history = counters.tolist()[:2] if counters is not None else lengths
    sink, ring, new = keys.sink.shape[2], keys.ring.shape[2], new_keys.shape[2]
    if limit is not None and length + new > limit:
        if counters is not None:
            counters[OVERFLOW] = 1
        return lengths
    packed = packed_after(length, history, sink, recent)
    begins = [0] * new_keys.shape[0] if start is None else start.tolist()
    for side, rows in ((keys, new_keys), (values, new_values)):
        if packed > history:
            index = torch.arange(history, packed, device=rows.device) % ring
            gone = side.ring[:, :, index]
            _open_blocks(side, history, packed, length, begins if start is not None else None)
            append_rows_reference(side, history, gone)
            if start is not None:
                _copy_to_sink(side.sink, gone, sink + history, begins)
        _copy_to_sink(side.sink, rows[:, :, : max(0, sink - length)], length, begins)
        slots = torch.arange(max(length, sink), max(length + new, sink), device=rows.device)
        side.ring[:, :, (slots - sink) % ring] = rows[:, :, slots - length].to(side.ring.dtype)
    if counters is None:
        return length + new, packed
    counters[LENGTH], counters[HISTORY] = length + new, packed
    return counters


def encode_ahead_reference(
    keys: Side, values: Side, counters: Tensor, recent: int, start: Tensor | None = None
) -> None:
    """Write the codes of the token that the next step packs, if there is one, behind the history, which stays as it is.

    counters: int32 [COUNTERS]; AHEAD is raised. start: int32 [B] first real slot of each row, None for zeros. The codes, and
    the center if the token opens a block, are those that the step would write; it skips what AHEAD counts.
    """
    length, history = counters.tolist()[:2]
    if packed_after(length, history, keys.sink.shape[2], recent) <= history:
        return
    for side in (keys, values):
        oldest = side.ring[:, :, history % side.ring.shape[2]].unsqueeze(2)
        _open_blocks(side, history, history + 1, length, None if start is None else start.tolist())
        append_rows_reference(side, history, oldest)
    counters[AHEAD] = history + 1


def _open_blocks(side: Side, history: int, packed: int, length: int, starts: list[int] | None) -> None:
    """`open_blocks` for history tokens history..packed-1 from the ring, which holds all from `history` on of `length`."""
    if not side.center_block:
        return
    sink, ring = side.sink.shape[2], side.ring.shape[2]
    held = torch.arange(history, length - sink, device=side.ring.device) % ring
    hidden = None if starts is None else [max(0, begin - sink) for begin in starts]
    open_blocks(side.rows, history, packed, side.ring[:, :, held], hidden)


def _copy_to_sink(sink: Tensor, rows: Tensor, first: int, begins: list[int]) -> None:
    """Copy those of slots first.. that are among the first real ones of their batch row: entry i is slot begin + i."""
    for b, begin in enumerate(begins):
        low, high = max(first, begin), min(first + rows.shape[2], begin + sink.shape[2])
        if low < high:
            sink[b, :, low - begin : high - begin] = rows[b, :, low - first : high - first].to(sink.dtype)


@triton.jit
def _mean_of_ring(ring_ptr, first, stop, ring, d, is_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mean of history tokens first..stop-1, float32 [BLOCK_D]; 0 if there are none."""
    ROWS: tl.constexpr = 2048 // BLOCK_D
    sums = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    for begin in range(first, stop, ROWS):
        rows = begin + tl.arange(0, ROWS)
        mask = (rows < stop)[:, None] & is_d[None, :]
        tile = tl.load(ring_ptr + (rows % ring * HEAD_DIM)[:, None] + d[None, :], mask=mask, other=0.0)
        sums += tile.to(tl.float32)
    return tl.div_rn(tl.sum(sums, axis=0), tl.maximum(stop - first, 1).to(tl.float32))


@triton.jit
def _step_side(
    new_ptr, codes_ptr, scale_ptr, min_ptr, sink_ptr, ring_ptr, transform_ptr, center_ptr, metric_ptr,
    first, history, encoded, packed, count, start, sink, ring,
    stride_nt, stride_rk, stride_rn, stride_ct, stride_mk, stride_mn, stride_cr, stride_st,
    HAS_TRANSFORM: tl.constexpr, HAS_CENTER: tl.constexpr, CENTER_BLOCK: tl.constexpr, STARTS: tl.constexpr,
    ENCODE_AHEAD: tl.constexpr, BLOCK_D: tl.constexpr,
    SYMMETRIC: tl.constexpr, CLIP_INDEX: tl.constexpr, SEARCH: tl.constexpr, WEIGHTED: tl.constexpr,
    LOW_FACTORS: tl.constexpr, HIGH_FACTORS: tl.constexpr, NUM_FACTORS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr,
    WORDS_TILE: tl.constexpr, PAIRED: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Keys or values of one KV head; pointers are at that head."""
    DIM_TILE: tl.constexpr = GROUPS_TILE * GROUP_TILE
    columns = tl.arange(0, DIM_TILE)
    is_channel = (columns // GROUP_TILE < GROUPS) & (columns % GROUP_TILE < GROUP_SIZE)
    channels = columns // GROUP_TILE * GROUP_SIZE + columns % GROUP_TILE
    d = tl.arange(0, BLOCK_D)
    is_d = d < HEAD_DIM
    one = tl.arange(0, 1)
    # What is only encoded ahead stays where it is, so that whatever reads the windows meanwhile finds them unchanged.
    if STARTS and not ENCODE_AHEAD:
        for j in range(history, packed):
            # The sink of a row that begins late reaches into the slots of the history.
            entry = sink + j - start + 0 * d
            exact = tl.load(ring_ptr + j % ring * HEAD_DIM + d, mask=is_d, other=0.0)
            tl.store(sink_ptr + entry * HEAD_DIM + d, exact, mask=is_d & (entry >= 0) & (entry < sink))
    if CENTER_BLOCK:
        # Blocks whose first token is among those: their centers are made of all their tokens that the ring holds.
        for block in range((encoded + CENTER_BLOCK - 1) // CENTER_BLOCK, (packed + CENTER_BLOCK - 1) // CENTER_BLOCK):
            begin = block * CENTER_BLOCK
            center = _mean_of_ring(
                ring_ptr, tl.maximum(begin, start - sink), tl.minimum(begin + CENTER_BLOCK, first - sink), ring, d,
                is_d, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
            tl.store(center_ptr + block * stride_ct + d, round_to_fp16(center).to(tl.float16), mask=is_d)
        # Other threads read what was stored.
        tl.debug_barrier()
    for j in range(encoded, packed):
        # The ring's slot 0 holds history token j - j % ring of those around j.
        x = rotate(
            ring_ptr, transform_ptr, center_ptr, channels, is_channel, j - j % ring, j % ring, ring, HEAD_DIM,
            stride_rk, stride_rn, stride_ct, HAS_TRANSFORM, HAS_CENTER, CENTER_BLOCK, HEAD_DIM, 1, BLOCK_K, DIM_TILE,
        )  # fmt: skip
        encode(
            x, metric_ptr, codes_ptr, scale_ptr, min_ptr, j + one, one == 0, channels, is_channel,
            stride_mk, stride_mn, stride_cr, stride_st, SYMMETRIC, CLIP_INDEX, SEARCH, WEIGHTED, LOW_FACTORS,
            HIGH_FACTORS, NUM_FACTORS, HEAD_DIM, GROUP_SIZE, GROUPS, GROUP_TILE, GROUPS_TILE, WORDS_TILE, PAIRED, 1,
            CANDIDATES, BLOCK_K,
        )  # fmt: skip
    # A new token may take the ring slot of one that left above.
    tl.debug_barrier()
    for i in range(count):
        slot = first + i + 0 * d
        row = tl.load(new_ptr + i * stride_nt + d, mask=is_d, other=0.0)
        entry = slot - start
        tl.store(sink_ptr + entry * HEAD_DIM + d, row, mask=is_d & (slot < sink) & (entry >= 0))
        at = tl.maximum(slot - sink, 0) % ring
        tl.store(ring_ptr + at * HEAD_DIM + d, row, mask=is_d & (slot >= sink))


# Numbers that change from step to step must not each ask for a compilation of their own.
@triton.jit(do_not_specialize=["length", "history", "new_tokens", "sink", "ring", "recent", "limit"])
def _step_kernel(
    new_k_ptr, new_v_ptr, k_codes_ptr, k_scale_ptr, k_min_ptr, v_codes_ptr, v_scale_ptr, v_min_ptr,
    sink_k_ptr, sink_v_ptr, ring_k_ptr, ring_v_ptr, k_transform_ptr, k_center_ptr, k_metric_ptr, v_transform_ptr,
    v_center_ptr, start_ptr, counters_ptr, length, history, new_tokens, sink, ring, recent, limit,
    stride_nkb, stride_nkh, stride_nkt, stride_nvb, stride_nvh, stride_nvt,
    stride_kcb, stride_kch, stride_kcr, stride_ksb, stride_ksh, stride_kst,
    stride_vcb, stride_vch, stride_vcr, stride_vsb, stride_vsh, stride_vst,
    stride_rh, stride_rk, stride_rn, stride_kmb, stride_kmh, stride_kmt, stride_mh, stride_mk, stride_mn,
    stride_wh, stride_wk, stride_wn, stride_vmb, stride_vmh, stride_vmt,
    HEADS: tl.constexpr, ON_DEVICE: tl.constexpr, ENCODE_AHEAD: tl.constexpr, STARTS: tl.constexpr,
    K_TRANSFORM: tl.constexpr, K_CENTER: tl.constexpr, K_CENTER_BLOCK: tl.constexpr,
    V_TRANSFORM: tl.constexpr, V_CENTER: tl.constexpr, V_CENTER_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    K_SYMMETRIC: tl.constexpr, K_CLIP_INDEX: tl.constexpr, K_SEARCH: tl.constexpr, K_WEIGHTED: tl.constexpr,
    K_LOW_FACTORS: tl.constexpr, K_HIGH_FACTORS: tl.constexpr, K_NUM_FACTORS: tl.constexpr, K_HEAD_DIM: tl.constexpr,
    K_GROUP_SIZE: tl.constexpr, K_GROUPS: tl.constexpr, K_GROUP_TILE: tl.constexpr, K_GROUPS_TILE: tl.constexpr,
    K_WORDS_TILE: tl.constexpr, K_PAIRED: tl.constexpr, K_CANDIDATES: tl.constexpr, K_BLOCK_K: tl.constexpr,
    V_SYMMETRIC: tl.constexpr, V_CLIP_INDEX: tl.constexpr, V_SEARCH: tl.constexpr, V_WEIGHTED: tl.constexpr,
    V_LOW_FACTORS: tl.constexpr, V_HIGH_FACTORS: tl.constexpr, V_NUM_FACTORS: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    V_GROUP_SIZE: tl.constexpr, V_GROUPS: tl.constexpr, V_GROUP_TILE: tl.constexpr, V_GROUPS_TILE: tl.constexpr,
    V_WORDS_TILE: tl.constexpr, V_PAIRED: tl.constexpr, V_CANDIDATES: tl.constexpr, V_BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (H, 2, B): keys are program 0 of the second axis, values program 1.

    ENCODE_AHEAD: no token is new, and the one that the next step packs is encoded.
    """
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    if ON_DEVICE:
        n = tl.load(counters_ptr)
        old = tl.load(counters_ptr + 1)
        encoded = tl.maximum(old, tl.load(counters_ptr + 4))
    else:
        n = length
        old = history
        encoded = old
    fits = n + new_tokens <= limit
    packed = tl.where(fits, tl.maximum(old, n - sink - recent + 1), old)
    if ENCODE_AHEAD:
        packed = tl.minimum(packed, old + 1)
    count = tl.where(fits, new_tokens, 0)
    start = 0
    if STARTS:
        start = tl.load(start_ptr + b)
    if tl.program_id(1) == 0:
        at = b * HEADS + h
        _step_side(
            new_k_ptr + b * stride_nkb + h * stride_nkh, k_codes_ptr + b * stride_kcb + h * stride_kch,
            k_scale_ptr + b * stride_ksb + h * stride_ksh, k_min_ptr + b * stride_ksb + h * stride_ksh,
            sink_k_ptr + at * sink * K_HEAD_DIM, ring_k_ptr + at * ring * K_HEAD_DIM,
            k_transform_ptr + h * stride_rh, k_center_ptr + b * stride_kmb + h * stride_kmh,
            k_metric_ptr + h * stride_mh, n, old, encoded, packed, count, start, sink, ring,
            stride_nkt, stride_rk, stride_rn, stride_kmt, stride_mk, stride_mn, stride_kcr, stride_kst,
            K_TRANSFORM, K_CENTER, K_CENTER_BLOCK, STARTS, ENCODE_AHEAD, K_BLOCK, K_SYMMETRIC, K_CLIP_INDEX, K_SEARCH,
            K_WEIGHTED, K_LOW_FACTORS, K_HIGH_FACTORS, K_NUM_FACTORS, K_HEAD_DIM, K_GROUP_SIZE, K_GROUPS,
            K_GROUP_TILE, K_GROUPS_TILE, K_WORDS_TILE, K_PAIRED, K_CANDIDATES, K_BLOCK_K,
        )  # fmt: skip
    else:
        at = b * HEADS + h
        _step_side(
            new_v_ptr + b * stride_nvb + h * stride_nvh, v_codes_ptr + b * stride_vcb + h * stride_vch,
            v_scale_ptr + b * stride_vsb + h * stride_vsh, v_min_ptr + b * stride_vsb + h * stride_vsh,
            sink_v_ptr + at * sink * V_HEAD_DIM, ring_v_ptr + at * ring * V_HEAD_DIM,
            v_transform_ptr + h * stride_wh, v_center_ptr + b * stride_vmb + h * stride_vmh, v_transform_ptr,
            n, old, encoded, packed, count, start, sink, ring,
            stride_nvt, stride_wk, stride_wn, stride_vmt, stride_wk, stride_wn, stride_vcr, stride_vst,
            V_TRANSFORM, V_CENTER, V_CENTER_BLOCK, STARTS, ENCODE_AHEAD, V_BLOCK, V_SYMMETRIC, V_CLIP_INDEX, V_SEARCH,
            V_WEIGHTED, V_LOW_FACTORS, V_HIGH_FACTORS, V_NUM_FACTORS, V_HEAD_DIM, V_GROUP_SIZE, V_GROUPS,
            V_GROUP_TILE, V_GROUPS_TILE, V_WORDS_TILE, V_PAIRED, V_CANDIDATES, V_BLOCK_K,
        )  # fmt: skip
    if ON_DEVICE:
        # Every program has read the counters before it draws its ticket, so the last one may change them.
        programs = tl.num_programs(0) * 2 * tl.num_programs(2)
        if tl.atomic_add(counters_ptr + 2, 1, sem="acq_rel") == programs - 1:
            tl.store(counters_ptr + 2, 0)
            if ENCODE_AHEAD:
                tl.store(counters_ptr + 4, tl.maximum(encoded, packed))
            else:
                tl.store(counters_ptr, n + count)
                tl.store(counters_ptr + 1, packed)
                tl.store(counters_ptr + 3, 1, mask=count < new_tokens)


def place_tokens_triton(keys, values, new_keys, new_values, lengths, recent, start=None, limit=None):
    """`place_tokens_reference` as one Triton launch, on the GPU that holds the tokens (or in the interpreter)."""
    if isinstance(lengths, Tensor):
        _launch(keys, values, new_keys, new_values, (0, 0), lengths, recent, start, limit)
        return lengths
    (length, history), new = lengths, new_keys.shape[2]
    if limit is not None and length + new > limit:
        return lengths
    packed = packed_after(length, history, keys.sink.shape[2], recent)
    for side in (keys, values):
        if packed > side.rows.capacity:
            raise ValueError(f"tokens up to {packed} do not fit the capacity {side.rows.capacity}: reserve first")
    _launch(keys, values, new_keys, new_values, lengths, None, recent, start, limit)
    return length + new, packed


def encode_ahead_triton(keys, values, counters, recent, start=None):
    """`encode_ahead_reference` as one Triton launch; may run beside whatever reads the history, but beside no step."""
    none_new = (side.ring[:, :, :0] for side in (keys, values))
    _launch(keys, values, *none_new, (0, 0), counters, recent, start, None, encode_ahead=True)


def _launch(keys, values, new_keys, new_values, lengths, counters, recent, start, limit, encode_ahead=False):
    batch, heads, new, key_dim = new_keys.shape
    value_dim, sink, ring = new_values.shape[3], keys.sink.shape[2], keys.ring.shape[2]
    new_keys, new_values = (x if x.stride(3) == 1 else x.contiguous() for x in (new_keys, new_values))
    for side in (keys, values):
        if side.rule.needs_metric and side.metric is None:
            raise ValueError("this scale rule needs the error metric of the keys: got none")
        if not (side.sink.is_contiguous() and side.ring.is_contiguous()):
            raise ValueError("sink and ring must be contiguous")
    plans, codes = [], []
    for side, dim in ((keys, key_dim), (values, value_dim)):
        plan = dict(encode_plan(dim, side.rows.group_size, side.rows.symmetric, side.rule, True))
        plan.pop("BLOCK_T")
        plans.append(plan)
        codes.append(side.rows.codes if tokens_per_row(dim) == 1 else side.rows.codes.view(torch.uint8))
    warps = max(plan["num_warps"] for plan in plans)
    named = {
        f"{prefix}_{name}": value
        for prefix, plan in zip("KV", plans)
        for name, value in plan.items()
        if name != "num_warps"
    }
    key_center, key_center_strides, key_block = center_rows(keys)
    value_center, value_center_strides, value_block = center_rows(values)
    # Tensors that are absent need some pointer to stand in for them.
    key_metric = keys.metric if plans[0]["WEIGHTED"] else None

    def present(tensor):
        return keys.sink if tensor is None else tensor

    with on_device(new_keys.device):
        _step_kernel[(heads, 2, batch)](
            new_keys, new_values, codes[0], keys.rows.scale, present(keys.rows.min),
            codes[1], values.rows.scale, present(values.rows.min), keys.sink, values.sink, keys.ring, values.ring,
            present(keys.transform), present(key_center), present(key_metric), present(values.transform),
            present(value_center), present(start), present(counters), *lengths, new, sink, ring, recent,
            (1 << 30) if limit is None else limit,
            *new_keys.stride()[:3], *new_values.stride()[:3],
            *codes[0].stride()[:3], *keys.rows.scale.stride()[:3],
            *codes[1].stride()[:3], *values.rows.scale.stride()[:3],
            *matrix_strides(keys.transform), *key_center_strides, *matrix_strides(key_metric),
            *matrix_strides(values.transform), *value_center_strides,
            HEADS=heads, ON_DEVICE=counters is not None, ENCODE_AHEAD=encode_ahead, STARTS=start is not None,
            K_TRANSFORM=keys.transform is not None, K_CENTER=key_center is not None, K_CENTER_BLOCK=key_block,
            V_TRANSFORM=values.transform is not None, V_CENTER=value_center is not None, V_CENTER_BLOCK=value_block,
            K_BLOCK=next_power_of_two(key_dim), V_BLOCK=next_power_of_two(value_dim),
            **named, num_warps=warps,
        )  # fmt: skip


def place_problem(keys: Side, values: Side) -> str:
    """Why the kernel cannot place tokens in this layer, or an empty string."""
    reason = launch_problem(keys.sink.device)
    for side in (keys, values):
        reason = reason or encode_problem(side.rows.head_dim, side.rows.group_size)
        if side is values and side.rule.needs_metric:
            reason = reason or "the step kernel takes a scale rule with an error metric for keys only"
    return reason
