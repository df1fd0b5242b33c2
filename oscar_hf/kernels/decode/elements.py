"""Element helpers of the decode kernels: crumbs as numbers, matrix-unit operands, and sums and factors of score tiles."""

from ...quantization.packed_rows import PAIRED_HEAD_DIM
from ..launch import tl, triton

# The head dim at which two tokens share a row of words, for kernels.
PAIRED_DIM = tl.constexpr(PAIRED_HEAD_DIM)
Q_UNIT = tl.constexpr(2048.0)
# Probabilities are kept 2^4 times too large against the recorded maximum, which cancels in the merge: fp16(p * scale) is
# then a normal number down to small value scales, and finite for scales up to 511 whatever the scores.
LIFT = tl.constexpr(4.0)
# Bit pattern of 128.0f, the largest sum of a thread's rows that needs no rescale.
LIMIT = tl.constexpr(0x43000000)
NEVER = tl.constexpr(-1.0e30)


@triton.jit
def crumb_plane(words, high, index: tl.constexpr, ASM: tl.constexpr):
    """Crumb `index` of int16 words as fp16 code 4^e 2^-24, e = index or index - 5; `high` is words >> 10."""
    # Assembly because LLVM would unpack every 16-bit half to a register of its own: 2.2x the instructions.
    if ASM:
        if index == 0:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00030003;", "=r,r", [words], tl.float16, True, 2)
        elif index == 1:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x000C000C;", "=r,r", [words], tl.float16, True, 2)
        elif index == 2:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00300030;", "=r,r", [words], tl.float16, True, 2)
        elif index == 3:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00C000C0;", "=r,r", [words], tl.float16, True, 2)
        elif index == 4:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x03000300;", "=r,r", [words], tl.float16, True, 2)
        elif index == 5:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00030003;", "=r,r", [high], tl.float16, True, 2)
        elif index == 6:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x000C000C;", "=r,r", [high], tl.float16, True, 2)
        else:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00300030;", "=r,r", [high], tl.float16, True, 2)
    else:
        if index < 5:
            bits = words & (3 << (2 * index))
        else:
            bits = high & (3 << (2 * index - 10))
        return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def high_bits(words, ASM: tl.constexpr):
    """Words shifted right by 10; the upper bits are not meant to be read (assembly and twin differ there)."""
    if ASM:
        return tl.inline_asm_elementwise("shr.b32 $0, $1, 10;", "=r,r", [words], tl.int16, True, 2)
    else:
        return words >> 10


@triton.jit
def fast_exp2(x, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.exp2(x)


@triton.jit
def softcapped(x, cap):
    """cap tanh(x / cap), both in log2 units; tanh through exp2, which cannot overflow to NaN this way round."""
    y = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(x) / cap)
    t = (1.0 - y) / (1.0 + y) * cap
    return tl.where(x < 0, -t, t)


@triton.jit
def operand_offset(index, NW: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Where element `index` of an operand vector (see `unfragment`) is stored: every warp reads the same copy."""
    INNER: tl.constexpr = (W // 16) * (N // 8) * 4 if (W // 16) * (N // 8) * 4 < 8 else 8
    return index // (INNER * 32 * NW) * (INNER * 32) + index % (INNER * 32)


@triton.jit
def unfragment(x, NW: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """1-D operand vector, one copy per warp, to [NW, W, N].

    The order is [rest][warp][lane n, 8][lane k, 4][inner], inner and rest running over (n / 8, k / 16, k / 8, k % 2): a
    plain vector load then already is an mma.m16n8k16 B operand and needs no shuffles (which would run in every round).
    """
    INNER: tl.constexpr = (W // 16) * (N // 8) * 4 if (W // 16) * (N // 8) * 4 < 8 else 8
    REST: tl.constexpr = W * N // (32 * INNER)
    x = tl.reshape(x, [REST, NW, 8, 4, INNER])
    x = tl.permute(x, [1, 2, 3, 0, 4])
    x = tl.reshape(x, [NW, 8, 4, N // 8, W // 16, 2, 2])
    x = tl.permute(x, [0, 4, 5, 2, 6, 3, 1])
    return tl.reshape(x, [NW, W, N])


@triton.jit
def fragment_offset(k, n, W: tl.constexpr, N: tl.constexpr):
    """Where element (k, n) of a [W, N] operand is stored: matrix-unit order, a single copy."""
    INNER: tl.constexpr = (W // 16) * (N // 8) * 4 if (W // 16) * (N // 8) * 4 < 8 else 8
    lane = n % 8 * 4 + k % 8 // 2
    inner = (n // 8 * (W // 16) + k // 16) * 4 + k % 16 // 8 * 2 + k % 2
    return inner // INNER * (32 * INNER) + lane * INNER + inner % INNER


@triton.jit
def per_column(x, NW: tl.constexpr, BT: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr, PAIR: tl.constexpr):
    """Per-token values [NW * TILES * BT] to [NW, BT, TILES * NC]: the token each place of a score tile is about."""
    if TILES == 1:
        return tl.broadcast_to(tl.reshape(x, [NW, BT])[:, :, None], [NW, BT, NC])
    if PAIR:
        x = tl.reshape(x, [NW, BT, TILES])
    else:
        x = tl.permute(tl.reshape(x, [NW, TILES, BT]), [0, 2, 1])
    return tl.reshape(tl.broadcast_to(x[:, :, :, None], [NW, BT, TILES, NC]), [NW, BT, TILES * NC])


@triton.jit
def split_groups(x, BLOCK: tl.constexpr, NG: tl.constexpr):
    """[BLOCK * NG] to NG vectors [BLOCK]."""
    if NG == 1:
        return (x,)
    elif NG == 2:
        a, b = tl.split(tl.reshape(x, [BLOCK, 2]))
        return (a, b)
    else:
        even, odd = tl.split(tl.reshape(x, [BLOCK, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return (a, b, c, d)


@triton.jit
def rows16(x, NW: tl.constexpr, BT: tl.constexpr, N: tl.constexpr):
    """Sum [NW, BT, N] to [NW, 16, N]: rows 16 apart sit in one thread, so this needs no shuffle."""
    return tl.sum(tl.reshape(x, [NW, BT // 16, 16, N]), axis=1)


@triton.jit
def column_max(x, NC: tl.constexpr, TILES: tl.constexpr):
    """Maximum of [NW, BT, TILES * NC] for every column, over the tiles that share it too: [TILES * NC]."""
    top = tl.max(tl.max(x, axis=1), axis=0)
    if TILES == 1:
        return top
    top = tl.max(tl.reshape(top, [TILES, NC]), axis=0)
    return tl.reshape(tl.broadcast_to(top[None, :], [TILES, NC]), [TILES * NC])


@triton.jit
def column_sum(x, NC: tl.constexpr, TILES: tl.constexpr):
    """Sum of [NW, 16, TILES * NC] over everything but the NC query columns."""
    return tl.sum(tl.reshape(tl.sum(tl.sum(x, axis=1), axis=0), [TILES, NC]), axis=0)


@triton.jit
def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def scaled(planes, factor):
    """Every plane of a tuple times the column factors."""
    out = ()
    for i in tl.static_range(len(planes)):
        out = out + (planes[i] * factor[None, None, :],)
    return out


@triton.jit
def fetch(ptr):
    """Ask for the cache lines of an early pointer block; a hint that needs no register until the data is used."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr.to(tl.int64)], tl.int32, False, 1)


@triton.jit
def plane_unit(index: tl.constexpr):
    """What turns crumb plane `index` back into codes: 2^24 4^-e."""
    return 2.0 ** (24 - 2 * (index % 5))
