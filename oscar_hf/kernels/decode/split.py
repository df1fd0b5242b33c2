"""Split: one warp per KV head and split reads codes; also, or alone, a piece of the sink or of the ring."""

from ..launch import tl, tlx, triton
from .block_shifts import block_shifts
from .elements import PAIRED_DIM, fetch
from .split_history import attend_history
from .split_windows import attend_window
from .tuning import history_splits

# Blocks of history whose shifts a program computes at a time.
SHIFT_ROWS = tl.constexpr(16)


@triton.jit
def _ahead(
    kc_ptr, ks_ptr, km_ptr, vc_ptr, vs_ptr, vm_ptr, begin, end,
    D: tl.constexpr, NG: tl.constexpr, NW: tl.constexpr, SYM: tl.constexpr,
):  # fmt: skip
    """Fetch tokens begin..end-1 to L2: the history is older than the queries, which are still being rotated."""
    LINE: tl.constexpr = 512 // D
    lanes = tl.arange(0, NW * 32)
    for n0 in range(begin, end, NW * 32 * LINE):
        ahead = tl.minimum(n0 // LINE + lanes, (end - 1) // LINE) * 64
        fetch(kc_ptr + ahead)
        fetch(vc_ptr + ahead)
    for n0 in range(begin, end, NW * 32 * 64 // NG):
        ahead = tl.minimum(n0 * NG + lanes * 64, (end - 1) * NG)
        fetch(ks_ptr + ahead)
        fetch(vs_ptr + ahead)
        if not SYM:
            fetch(km_ptr + ahead)
            fetch(vm_ptr + ahead)


@triton.jit
def _ahead_centers(centers_ptr, first, last, D: tl.constexpr, NW: tl.constexpr):
    """Fetch the centers of blocks first..last-1 to L2."""
    LINE: tl.constexpr = 64
    for at in range(first * D, last * D, NW * 32 * LINE):
        fetch(centers_ptr + tl.minimum(at + tl.arange(0, NW * 32) * LINE, last * D - 1))


# Numbers that change while a sequence grows must not each ask for a compilation of their own.
@triton.jit(
    do_not_specialize=[
        "length", "history", "n_sink", "n_window", "window", "ahead", "offset", "limit", "longest", "alone",
        "parts", "blocks", "cols", "stride_mb", "stride_mh", "stride_mm",
    ]
)  # fmt: skip
def split_kernel(
    q_ptr, frag_ptr, info_ptr, shift_ptr, centers_ptr, kc_ptr, ks_ptr, km_ptr, vc_ptr, vs_ptr, vm_ptr,
    sink_k_ptr, sink_v_ptr, ring_k_ptr, ring_v_ptr, start_ptr, mask_ptr, facts_ptr, o_ptr, ml_ptr,
    length, history, stride_qb, stride_qh, stride_qm,
    stride_cb, stride_ch, stride_sb, stride_sh, stride_kb, stride_kh, stride_rb, stride_rh, stride_nb, stride_nh, blocks,
    stride_mb, stride_mh, stride_mm, stride_mn, stride_fb,
    sink, ring, n_sink, n_window, window, ahead, offset, limit, longest, alone, parts,
    cols, new_tokens, scale, mask_floor, cap,
    HKV: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, NG: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr,
    BT: tl.constexpr, STAGES: tl.constexpr, WB: tl.constexpr, SLICE: tl.constexpr, SYM: tl.constexpr,
    MASK: tl.constexpr, FACTS: tl.constexpr, STARTS: tl.constexpr, CAP: tl.constexpr, ON_DEVICE: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, ASM: tl.constexpr, FINE: tl.constexpr, PDL: tl.constexpr,
    NW: tl.constexpr, CENTER_BLOCK: tl.constexpr, OWN_SHIFTS: tl.constexpr, SHIFT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv, programs, chunks). Program i takes window piece i and history split i - offset, where they exist.

    Piece i writes part i, split i part n_window + i: o[.., part] fp32 [NC, D], ml[.., part] [2, NC].
    """
    if PDL:
        tlx.gdc_launch_dependents()
    bh = tl.program_id(0)
    part = tl.program_id(1)
    chunk = tl.program_id(2)
    b = (bh // HKV).to(tl.int64)
    hk = (bh % HKV).to(tl.int64)
    if ON_DEVICE:
        n = tl.load(length)
        h = tl.load(history)
    else:
        n = length
        h = history
    start = 0
    if STARTS:
        start = tl.load(start_ptr + b)
    low = start
    low_slot = start
    reads = 1
    if FACTS:
        first_slot = tl.load(facts_ptr + b * stride_fb)
        reads = tl.load(facts_ptr + b * stride_fb + 1)
        low = tl.maximum(low, first_slot - sink)
        low_slot = tl.maximum(low_slot, first_slot)
    BLOCK: tl.constexpr = NW * TILES * BT
    skipped, body, share, n_splits = history_splits(h, low, limit, longest, alone, BLOCK)
    split = part - offset
    # The grid may cover more than is in use: what a cache can hold, or what other rows hold.
    programs = tl.maximum(n_window, tl.where(n_splits > 0, offset + n_splits, 0))
    if part < programs:
        query = (bh * tl.num_programs(2) + chunk).to(tl.int64)
        o_ptr += query * parts * (NC * D)
        ml_ptr += query * parts * (2 * NC)
        rep_head = (bh % HKV) * REP
        if MASK > 0:
            mask_ptr += b * stride_mb
        codes = b * stride_cb + hk * stride_ch
        scales = b * stride_sb + hk * stride_sh
        begin = (skipped + tl.minimum(split * share, body)) * BLOCK
        end = (skipped + tl.minimum(split * share + share, body)) * BLOCK
        end = tl.where(begin == end, begin + BLOCK, end)
        in_history = (split >= 0) & (split < n_splits)
        if PDL:
            fetched = tl.minimum(tl.minimum(end, begin + ahead), h)
            _ahead(
                kc_ptr + codes, ks_ptr + scales, km_ptr + scales, vc_ptr + codes, vs_ptr + scales, vm_ptr + scales,
                begin, tl.where(in_history, fetched, begin), D, NG, NW, SYM,
            )  # fmt: skip
        if OWN_SHIFTS:
            centers_ptr += b * stride_nb + hk * stride_nh
            first_block = begin // CENTER_BLOCK
            last_block = (tl.minimum(end, h) + CENTER_BLOCK - 1) // CENTER_BLOCK
            last_block = tl.where(in_history, last_block, first_block)
            if PDL:
                _ahead_centers(centers_ptr, first_block, last_block, D, NW)
        if part < n_sink:
            at = b * stride_kb + hk * stride_kh
            first = part * window
            attend_window(
                q_ptr + b * stride_qb, sink_k_ptr + at, sink_v_ptr + at, mask_ptr,
                o_ptr + part * (NC * D), ml_ptr + part * (2 * NC),
                stride_qh, stride_qm, n, h, start, low_slot, reads, sink, ring,
                first, tl.minimum(first + window, tl.minimum(sink, n)),
                chunk * NC, cols, new_tokens, rep_head, scale, stride_mh, stride_mm, stride_mn, mask_floor, cap,
                False, D, NC, WB, STARTS or FACTS, MASK, CAP, PRECISION, WIDEN,
            )  # fmt: skip
        elif part < n_window:
            at = b * stride_rb + hk * stride_rh
            first = (part - n_sink) * window
            attend_window(
                q_ptr + b * stride_qb, ring_k_ptr + at, ring_v_ptr + at, mask_ptr,
                o_ptr + part * (NC * D), ml_ptr + part * (2 * NC),
                stride_qh, stride_qm, n, h, start, low_slot, reads, sink, ring,
                first, tl.minimum(first + window, n - sink - h),
                chunk * NC, cols, new_tokens, rep_head, scale, stride_mh, stride_mm, stride_mn, mask_floor, cap,
                True, D, NC, WB, STARTS or FACTS, MASK, CAP, PRECISION, WIDEN,
            )  # fmt: skip
        if OWN_SHIFTS:
            # Queries as they were given will do, so that the wait for the rotated ones hides this.
            if in_history:
                block_shifts(
                    q_ptr + b * stride_qb, centers_ptr, shift_ptr + query * blocks * NC, stride_qh, stride_qm, first_block,
                    last_block, chunk * NC, cols, new_tokens, rep_head, scale,
                    D, NC, SHIFT_ROWS, 2, SHIFT_PRECISION,
                )  # fmt: skip
            # Other lanes read what one stored.
            tl.debug_barrier()
        if PDL:
            # The history's split needs the rotated queries; a program without one waits too, so that whatever waits for
            # this kernel has also waited for the one before.
            tlx.gdc_wait()
        if in_history:
            attend_history(
                frag_ptr + query * ((128 if D == PAIRED_DIM else D * TILES) * NC * TILES),
                info_ptr + query * ((D // SLICE + 2) * NC), shift_ptr + query * blocks * NC,
                kc_ptr + codes, ks_ptr + scales, km_ptr + scales, vc_ptr + codes, vs_ptr + scales, vm_ptr + scales,
                mask_ptr, o_ptr + (n_window + split) * (NC * D), ml_ptr + (n_window + split) * (2 * NC),
                h, low, reads, sink, begin, end, chunk * NC,
                cols, new_tokens, rep_head, stride_mh, stride_mm, stride_mn, mask_floor, cap,
                D, NG, NC, TILES, NW, BT, STAGES, SLICE, SYM, MASK, STARTS or FACTS, CAP, ASM, FINE, CENTER_BLOCK,
            )  # fmt: skip
