"""Packed storage of quantized rows: 2-bit codes, 8 to an int16 word, with fp16 scale and min per group.

Layout (the kernels read it as it is). For head dim D other than 64, word w of a row holds the codes of channels w,
w + D/8, ..., w + 7D/8 in its 8 crumbs (crumb i = bits 2i and 2i+1). For D = 64 a row of 16 words holds two tokens,
crumbs 0-3 the even one and 4-7 the odd one; crumb i of word w is channel 16 (i mod 4) + w. So every crumb plane of a
tile is a matrix operand at least 16 wide wherever D >= 64. Words are little-endian: the low byte is crumbs 0-3.
"""

import torch
from torch import Tensor

PAIRED_HEAD_DIM = 64
# A buffer grows by a quarter at a time, rounded up to this many tokens: appends stay O(1) and the slack small.
_GROWTH, _ROUND = 1.25, 64


def tokens_per_row(head_dim: int) -> int:
    """Tokens that share one row of words: 2 for head dim 64, else 1."""
    return 2 if head_dim == PAIRED_HEAD_DIM else 1


def pack_token_bytes(codes: Tensor) -> Tensor:
    """Codes uint8 [..., D] of single tokens to their D/4 bytes, in the order they have in a row of words."""
    dim = codes.shape[-1]
    if dim == PAIRED_HEAD_DIM:
        crumbs = codes.unflatten(-1, (4, 16))
        return _four_crumbs(crumbs)
    crumbs = codes.unflatten(-1, (2, 4, dim // 8))
    return _four_crumbs(crumbs).movedim(-2, -1).flatten(-2)


def _four_crumbs(crumbs: Tensor) -> Tensor:
    """[..., 4, n] codes to [..., n] bytes, crumb i in bits 2i and 2i+1."""
    return crumbs[..., 0, :] | crumbs[..., 1, :] << 2 | crumbs[..., 2, :] << 4 | crumbs[..., 3, :] << 6


def unpack_token_bytes(token_bytes: Tensor, head_dim: int) -> Tensor:
    """Inverse of `pack_token_bytes`: uint8 [..., D/4] to codes uint8 [..., D]."""
    if head_dim == PAIRED_HEAD_DIM:
        planes = token_bytes[..., None, :]
    else:
        planes = token_bytes.unflatten(-1, (head_dim // 8, 2)).movedim(-1, -2)[..., None, :]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=token_bytes.device)[:, None]
    return (planes >> shifts & 3).flatten(-3 if head_dim != PAIRED_HEAD_DIM else -2)


class PackedRows:
    """Growing store of the quantized rows of one tensor (keys or values) of one layer.

    codes: int16 [B, H, C / tokens_per_row, words]; scale, min: fp16 [B, H, C, D / G], min None when symmetric. C is the
    capacity in tokens; how many of them are in use is the owner's business, so that a length is never stored twice.
    """

    def __init__(self, batch, heads, head_dim, group_size, symmetric, device, capacity=0):
        self.head_dim, self.group_size, self.symmetric = head_dim, group_size, symmetric
        self.codes, self.scale, self.min = self._allocate(batch, heads, capacity, device)

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, minimum: Tensor | None, head_dim: int) -> "PackedRows":
        """A store over tensors that exist already."""
        rows = cls.__new__(cls)
        rows.head_dim, rows.group_size, rows.symmetric = head_dim, head_dim // scale.shape[3], minimum is None
        rows.codes, rows.scale, rows.min = codes, scale, minimum
        return rows

    def _allocate(self, batch, heads, capacity, device):
        # A row of words that holds two tokens is allocated whole.
        rows = -(-capacity // tokens_per_row(self.head_dim))
        capacity = rows * tokens_per_row(self.head_dim)
        words = self.head_dim // 8 * tokens_per_row(self.head_dim)
        # Zeroed, not empty: unused capacity must never hold a NaN that 0 * NaN would let through.
        codes = torch.zeros(batch, heads, rows, words, dtype=torch.int16, device=device)
        shape = (batch, heads, capacity, self.head_dim // self.group_size)
        scale = torch.zeros(shape, dtype=torch.float16, device=device)
        return codes, scale, None if self.symmetric else torch.zeros_like(scale)

    @property
    def capacity(self) -> int:
        """Tokens that fit without growing."""
        return self.scale.shape[2]

    @property
    def tensors(self) -> list[Tensor]:
        """The stored tensors: codes, scale and, unless symmetric, min."""
        return [self.codes, self.scale] + ([] if self.min is None else [self.min])

    def map(self, function) -> None:
        """Replace every stored tensor by `function(tensor)`: gathers over the batch, moves between devices."""
        self.codes, self.scale = function(self.codes), function(self.scale)
        self.min = None if self.min is None else function(self.min)

    @torch.inference_mode(False)
    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in total; grows geometrically and copies this one store alone."""
        if tokens <= self.capacity:
            return
        # The first allocation is a prompt of known size; only a store that already grew once earns more slack.
        wanted = tokens + _ROUND if self.capacity == 0 else max(tokens, int(self.capacity * _GROWTH))
        wanted = -(-wanted // _ROUND) * _ROUND
        old = self.tensors
        batch, heads = self.codes.shape[:2]
        self.codes, self.scale, self.min = self._allocate(batch, heads, wanted, self.codes.device)
        for new, previous in zip(self.tensors, old):
            new[:, :, : previous.shape[2]] = previous

    def _token_bytes_view(self, start: int, stop: int) -> Tensor:
        """uint8 view [B, H, rows, tokens_per_row, D/4] of the whole rows that hold tokens start..stop-1."""
        per_row = tokens_per_row(self.head_dim)
        rows = self.codes[:, :, start // per_row : -(-stop // per_row)].view(torch.uint8)
        if per_row == 1:
            return rows[:, :, :, None]
        return rows.unflatten(-1, (self.head_dim // 4, 2)).transpose(-1, -2)

    def write(self, start: int, codes: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
        """Store codes uint8 [B, H, T, D] and their qparams as tokens start..start+T-1; room must be reserved."""
        stop, per_row = start + codes.shape[2], tokens_per_row(self.head_dim)
        token_bytes = pack_token_bytes(codes)
        if per_row == 1:
            self._token_bytes_view(start, stop)[:, :, :, 0] = token_bytes
        else:
            view = self._token_bytes_view(start, stop)
            for parity in range(per_row):
                tokens = token_bytes[:, :, (parity - start) % per_row :: per_row]
                first = 1 if start % per_row > parity else 0
                view[:, :, first : first + tokens.shape[2], parity] = tokens
        self.scale[:, :, start:stop] = scale
        if minimum is not None:
            self.min[:, :, start:stop] = minimum

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes uint8 [B, H, stop-start, D] and the scale and min of tokens start..stop-1."""
        per_row = tokens_per_row(self.head_dim)
        view = self._token_bytes_view(start, stop)
        token_bytes = view.flatten(2, 3)[:, :, start % per_row : start % per_row + stop - start]
        minimum = None if self.min is None else self.min[:, :, start:stop]
        return unpack_token_bytes(token_bytes, self.head_dim), self.scale[:, :, start:stop], minimum

    @property
    def code_bytes(self) -> int:
        """Bytes allocated for codes."""
        return self.codes.nbytes

    @property
    def qparam_bytes(self) -> int:
        """Bytes allocated for scale and min."""
        return self.scale.nbytes + (0 if self.min is None else self.min.nbytes)
