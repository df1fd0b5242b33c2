"""Packed storage of quantized rows: 2-bit codes, 8 to an int16 word, with fp16 scale and min per group, and the centers of blocks.

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


def packed_shapes(
    batch: int, heads: int, head_dim: int, group_size: int, symmetric: bool, tokens: int, center_block: int = 0
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each tensor that stores `tokens` rows, by name; the one home of the layout above the level of words."""
    per_row = tokens_per_row(head_dim)
    qparams = (torch.float16, (batch, heads, tokens, head_dim // group_size))
    # A row of words that holds two tokens is stored whole.
    shapes = {"codes": (torch.int16, (batch, heads, -(-tokens // per_row), head_dim // 8 * per_row)), "scale": qparams}
    if not symmetric:
        shapes["min"] = qparams
    if center_block:
        shapes["centers"] = (torch.float16, (batch, heads, -(-tokens // center_block), head_dim))
    return shapes


class PackedRows:
    """Growing store of the quantized rows of one tensor (keys or values) of one layer.

    codes: int16 [B, H, C / tokens_per_row, words]; scale, min: fp16 [B, H, C, D / G], min None when symmetric. centers: fp16
    [B, H, C / center_block, D], what was taken off the rows of each block of `center_block` tokens, in the model's basis; None
    where center_block is 0. C is the capacity in tokens; how many of them are in use is the owner's business, so that a length
    is never stored twice.
    """

    def __init__(self, batch, heads, head_dim, group_size, symmetric, device, capacity=0, center_block=0):
        self.head_dim, self.group_size, self.symmetric, self.center_block = (
            head_dim,
            group_size,
            symmetric,
            center_block,
        )
        self._set(self._allocate(batch, heads, capacity, device))

    @classmethod
    def of(cls, tensors: dict[str, Tensor], head_dim: int, center_block: int = 0) -> "PackedRows":
        """A store over tensors that exist already, named as in `packed_shapes`."""
        rows = cls.__new__(cls)
        rows.head_dim, rows.symmetric, rows.center_block = head_dim, "min" not in tensors, center_block
        rows.group_size = head_dim // tensors["scale"].shape[3]
        rows._set(tensors)
        return rows

    def _set(self, tensors: dict[str, Tensor]) -> None:
        self.codes, self.scale, self.min = tensors["codes"], tensors["scale"], tensors.get("min")
        self.centers = tensors.get("centers")

    def shapes(self, tokens: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """`packed_shapes` of this store for a number of tokens."""
        batch, heads = self.codes.shape[:2]
        return packed_shapes(batch, heads, self.head_dim, self.group_size, self.symmetric, tokens, self.center_block)

    def _allocate(self, batch, heads, capacity, device) -> dict[str, Tensor]:
        capacity = -(-capacity // tokens_per_row(self.head_dim)) * tokens_per_row(self.head_dim)
        shapes = packed_shapes(
            batch, heads, self.head_dim, self.group_size, self.symmetric, capacity, self.center_block
        )
        # Zeroed, not empty: unused capacity must never hold a NaN that 0 * NaN would let through.
        return {name: torch.zeros(shape, dtype=dtype, device=device) for name, (dtype, shape) in shapes.items()}

    @property
    def capacity(self) -> int:
        """Tokens that fit without growing."""
        return self.scale.shape[2]

    @property
    def named(self) -> dict[str, Tensor]:
        """The stored tensors by name: codes, scale, unless symmetric min, and centers where blocks have them."""
        every = {"codes": self.codes, "scale": self.scale, "min": self.min, "centers": self.centers}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    def mapped(self, function) -> "PackedRows":
        """A store of `function(tensor)` for every stored tensor: gathers over the batch, moves between devices."""
        return PackedRows.of(
            {name: function(tensor) for name, tensor in self.named.items()}, self.head_dim, self.center_block
        )

    @torch.inference_mode(False)
    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in total; grows geometrically and copies this one store alone."""
        if tokens <= self.capacity:
            return
        # The first allocation is a prompt of known size; only a store that already grew once earns more slack.
        wanted = tokens + _ROUND if self.capacity == 0 else max(tokens, int(self.capacity * _GROWTH))
        wanted = -(-wanted // _ROUND) * _ROUND
        new = self._allocate(*self.codes.shape[:2], wanted, self.codes.device)
        for name, old in self.named.items():
            new[name][:, :, : old.shape[2]] = old
        self._set(new)

    def in_use(self, tokens: int) -> dict[str, Tensor]:
        """The tensors of the first `tokens` rows by name, without slack."""
        found = {name: self.named[name][:, :, : shape[2]] for name, (_, shape) in self.shapes(tokens).items()}
        if tokens % tokens_per_row(self.head_dim):
            # The second token of the last row of words was taken back or never there.
            found["codes"] = found["codes"].clone()
            found["codes"][:, :, -1].view(torch.uint8).unflatten(-1, (-1, 2))[..., 1] = 0
        return found

    def fill(self, tensors: dict[str, Tensor], tokens: int) -> None:
        """Take what `in_use` gave of another store."""
        self.reserve(tokens)
        for name, tensor in tensors.items():
            self.named[name][:, :, : tensor.shape[2]] = tensor

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

    @property
    def center_bytes(self) -> int:
        """Bytes allocated for the centers of blocks."""
        return 0 if self.centers is None else self.centers.nbytes
