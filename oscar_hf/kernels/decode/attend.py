"""Decode attention: the three launches."""

import math

import torch
from torch import Tensor

from ...quantization.packed_rows import PAIRED_HEAD_DIM
from ..launch import interpreting, next_power_of_two
from ..launch import on_device as on_device_of
from .mask_facts import mask_arguments
from .merge import merge_kernel
from .prepare import SHIFT_ROWS, prepare_kernel
from .split import split_kernel
from .store import DecodeStore
from .tuning import Tuning, choose_tuning, splits_in_use

LOG2E = math.log2(math.e)


def _strides(keys: Tensor, values: Tensor | None, what: str) -> tuple[int, int]:
    """Batch and head strides of a pair of buffers, which must agree and have dense rows."""
    for x in (keys, values):
        if x is not None and (x.stride(3) != 1 or x.stride(2) != x.shape[3] or x.stride()[:2] != keys.stride()[:2]):
            raise ValueError(f"{what}: the decode kernel needs dense rows and the same strides for keys and values")
    return keys.stride(0), keys.stride(1)


def _head_stride(matrix: Tensor | None) -> int:
    return 0 if matrix is None or matrix.dim() == 2 else matrix.stride(0)


def decode_attention(
    query: Tensor,
    store: DecodeStore,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    mask_facts: Tensor | None = None,
    tuning: Tuning | None = None,
) -> Tensor:
    """Attention of the last M tokens over the whole cache, M of them new: [B, Hq, M, D] in, the same out (contiguous).

    mask: bool (True: attend) or additive, broadcastable to [B, Hq, M, length]; scale: default D^-1/2;
    softcap: scores become cap tanh(score / cap); s_aux: [Hq] learned logit per head that takes part in the softmax only;
    mask_facts: int32 [B or 1, 2], what the function of that name says of this mask, which then is read only if it must
    be (B in all, so that a padded row does not make the others slow);
    tuning: for benchmarks. Slots are causal among the new tokens; a row that may attend to nothing gives zeros.
    """
    batch, heads, new, head_dim = query.shape
    key, value = store.keys, store.values
    keys, values = key.rows, value.rows
    kv_heads, groups = keys.codes.shape[1], keys.scale.shape[-1]
    rep = heads // kv_heads
    cols = rep * new
    sink, ring = key.sink.shape[2], key.ring.shape[2]
    t = tuning or choose_tuning(query, store)
    chunks = -(-cols // t.columns)
    on_device = isinstance(store.history, Tensor)
    # The grid covers what the buffers can hold; what they do hold is on the device or, as a number, trims the grid.
    sink_used = sink if on_device else min(store.length, sink)
    ring_used = ring if on_device else max(0, store.length - sink - store.history)
    n_sink = -(-sink_used // t.window)
    n_window = n_sink + -(-ring_used // t.window)
    most = keys.scale.shape[2] if on_device else store.history
    splits = splits_in_use(most, t)
    if on_device or store.start is not None or mask_facts is not None:
        # Fewer blocks than the most may take more splits than those, whose shares are rounded up.
        blocks = -(-most // t.tokens)
        splits = min(max(t.splits, -(-blocks // t.longest)) + t.alone, blocks)
    offset = 0 if t.together else n_window
    parts = n_window + splits
    grid = max(1, n_window, offset + splits if splits else 0)
    symmetric = keys.min is None
    center_block = keys.center_block
    if center_block % t.tokens:
        raise ValueError(f"blocks of {t.tokens} tokens must divide those of {center_block} that share a center")
    center_blocks = -(-most // center_block) if center_block else 0
    pair = head_dim == PAIRED_HEAD_DIM
    slice_ = min(t.prepare_slice, head_dim // groups)

    device, programs = query.device, batch * kv_heads * chunks
    operand = t.columns * t.tiles * (16 if pair else head_dim // 8)
    frag = torch.empty(programs * operand * (8 if pair else 8 * t.tiles), dtype=torch.float16, device=device)
    info = torch.empty(programs * (head_dim // slice_ + 2) * t.columns, dtype=torch.float32, device=device)
    shift = torch.empty(programs * center_blocks * t.columns, dtype=torch.float32, device=device)
    partial = torch.empty(programs * parts * t.columns * head_dim, dtype=torch.float32, device=device)
    max_sum = torch.empty(programs * parts * t.columns * 2, dtype=torch.float32, device=device)
    out = torch.empty(batch, heads, new, head_dim, dtype=query.dtype, device=device)

    if query.stride(3) != 1:
        query = query.contiguous()
    query_strides = query.stride()[:3]
    key_query = key.query_transform
    key_query = None if key_query is None else key_query.contiguous()
    value_inverse = value.inverse
    turned = value_inverse is not None and not value_inverse.is_contiguous()
    if turned:
        # An inverse is usually kept as a view of its orthogonal transform: no copy then.
        value_inverse = value_inverse.mT.contiguous()
    mask, mask_kind, mask_floor, mask_strides = mask_arguments(mask)
    facts_stride = 0 if mask_facts is None or mask_facts.shape[0] == 1 else 2
    scale = (head_dim**-0.5 if scale is None else scale) * LOG2E
    cap = 0.0 if softcap is None else softcap * LOG2E
    if not symmetric:
        _strides(keys.scale, keys.min, "mins")
        _strides(keys.scale, values.min, "mins")
    center_strides = _strides(keys.centers, None, "centers") if center_block else (0, 0)
    # tf32 holds queries and centers of 16 bits exactly.
    shift_precision = "tf32x3" if query.dtype == torch.float32 else "tf32"
    mean = None if center_block else key.mean
    shift_tiles = 0 if t.own_shifts else t.prepare_rows * -(-center_blocks // SHIFT_ROWS)
    rotate = value_inverse is not None
    after_prepare = t.pdl and splits > 0
    with on_device_of(device):
        if splits:
            prepare_kernel[(-(-batch // t.prepare_rows) * kv_heads, chunks, head_dim // slice_ + shift_tiles)](
                query, key_query, mean, keys.centers, frag, info, shift, store.history, *query_strides,
                _head_stride(key_query), *center_strides, center_blocks, batch, cols, chunks, new, scale,
                HKV=kv_heads, REP=rep, D=head_dim, NC=t.columns, TILES=t.tiles, RB=t.prepare_rows, SLICE=slice_,
                ROTATE=key_query is not None, CENTERED=mean is not None, CENTER_BLOCK=0 if t.own_shifts else center_block,
                SB=SHIFT_ROWS, ON_DEVICE=on_device, PRECISION=shift_precision, PDL=t.pdl,
                num_warps=t.prepare_warps,
            )  # fmt: skip
        split_kernel[(batch * kv_heads, grid, chunks)](
            query, frag, info, shift, keys.centers, keys.codes, keys.scale, keys.scale if symmetric else keys.min,
            values.codes, values.scale, values.scale if symmetric else values.min,
            key.sink, value.sink, key.ring, value.ring, store.start, mask, mask_facts,
            partial, max_sum, store.length, store.history,
            *query_strides, *_strides(keys.codes, values.codes, "codes"),
            *_strides(keys.scale, values.scale, "scales"), *_strides(key.sink, value.sink, "sink"),
            *_strides(key.ring, value.ring, "ring"), *center_strides, center_blocks, *mask_strides, facts_stride,
            sink, ring, n_sink, n_window, t.window, t.ahead, offset, t.splits, t.longest, int(t.alone), parts,
            cols, new, scale, mask_floor, cap,
            HKV=kv_heads, REP=rep, D=head_dim, NG=groups, NC=t.columns, TILES=t.tiles, BT=t.block, STAGES=t.stages,
            WB=t.window_block, SLICE=slice_, SYM=symmetric, MASK=mask_kind, FACTS=mask_facts is not None,
            STARTS=store.start is not None, CAP=softcap is not None, ON_DEVICE=on_device,
            PRECISION="tf32x3" if query.dtype == torch.float32 else "ieee",
            WIDEN=interpreting(), ASM=t.asm, FINE=query.dtype != torch.bfloat16, PDL=after_prepare, NW=t.warps,
            CENTER_BLOCK=center_block, OWN_SHIFTS=center_block > 0 and t.own_shifts, SHIFT_PRECISION=shift_precision,
            num_warps=t.warps, num_stages=t.stages, maxnreg=t.registers, launch_pdl=after_prepare,
        )  # fmt: skip
        per_program = min(t.merge_columns, t.columns)
        merge_kernel[(-(-batch // t.merge_rows) * kv_heads, -(-cols // per_program), head_dim // t.merge_slice)](
            partial, max_sum, value_inverse, s_aux, out, store.start, mask_facts, store.history, parts, n_window, sink,
            t.splits, t.longest, int(t.alone), t.tokens, facts_stride, _head_stride(value_inverse),
            batch, cols, new, chunks,
            ON_DEVICE=on_device, STARTS=store.start is not None, FACTS=mask_facts is not None,
            HKV=kv_heads, REP=rep, D=head_dim, NC=t.columns, DS=t.merge_slice,
            # Few distinct sizes, so that a growing sequence does not compile anew again and again.
            PT=max(32, next_power_of_two(parts)), PB=t.merge_parts, PW=max(8, next_power_of_two(n_window)),
            PER=per_program, RB=t.merge_rows, ROTATE=rotate, TURNED=turned, AUX=s_aux is not None, PDL=t.pdl,
            num_warps=t.merge_warps, launch_pdl=t.pdl,
        )  # fmt: skip
    return out
