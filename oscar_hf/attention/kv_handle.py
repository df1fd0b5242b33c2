"""OscarKV: what `OscarCache.update` returns for K and for V instead of a dense tensor.

A light object, not a Tensor subclass (those cannot be traced by torch.compile). It implements `__torch_function__`,
follows the views that transformers takes (repeat_kv, enable_gqa, pack_gqa, transpose) without doing them, and hands over
to its view of the cache at `scaled_dot_product_attention` or at the two `matmul`s of eager attention. Any other operation
gets the dense dequantized tensor, with one warning that names the operation.
"""

import enum
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from .views import AttentionView

_warned: set[str] = set()


def _warn_dense(operation: str) -> None:
    if not torch.compiler.is_compiling() and operation not in _warned:
        _warned.add(operation)
        warnings.warn(
            f"oscar_hf: the attention code used `{operation}`, which has no packed path: "
            "this layer's whole history is dequantized on every step",
            stacklevel=4,
        )


def _is_device(value, device: torch.device) -> bool:
    """Whether `value` names `device`; anything but a device does not."""
    return isinstance(value, (str, torch.device)) and torch.device(value) == device


class Form(enum.Enum):
    """Which of the views that transformers takes of keys and values a handle stands for."""

    HEADS = "[B, H, T, D], H repeated if `repeat` is more than 1"
    BEFORE_EXPAND = "[B, H, 1, T, D], the first step of repeat_kv"
    EXPANDED = "[B, H, repeat, T, D], the second; a reshape leads back to HEADS"
    TRANSPOSED = "[B, H, D, T], as eager attention multiplies keys"


class OscarKV:
    """Stands for the keys ("k") or values ("v") of one layer right after an update.

    source: the call's view of the layer, see `views.AttentionView`. shape: that of the dense tensor in the present form.
    repeat: how often each KV head is repeated.
    """

    # What torch and transformers ask of a tensor before they use it.
    requires_grad = is_nested = is_sparse = is_quantized = False

    def __init__(self, source: AttentionView, kind: str, shape, repeat: int = 1, form: Form = Form.HEADS):
        self.source, self.kind, self.repeat, self.form = source, kind, repeat, form
        self.shape, self.dtype, self.device = torch.Size(shape), source.dtype, source.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def is_contiguous(self, *args, **kwargs) -> bool:
        return True

    def contiguous(self, *args, **kwargs) -> "OscarKV":
        return self

    def detach(self) -> "OscarKV":
        return self

    def __repr__(self) -> str:
        return f"OscarKV({self.kind}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    # The lazy views of transformers' repeat_kv and eager attention.
    def _with(self, shape, repeat: int, form: Form) -> "OscarKV":
        return OscarKV(self.source, self.kind, shape, repeat, form)

    def __getitem__(self, index):
        everything = slice(None)
        if (
            self.form is Form.HEADS
            and self.repeat == 1
            and isinstance(index, tuple)
            and len(index) == 5
            and index[2] is None
            and all(part == everything for part in (index[0], index[1], index[3], index[4]))
        ):
            batch, heads, tokens, dim = self.shape
            return self._with((batch, heads, 1, tokens, dim), 1, Form.BEFORE_EXPAND)
        return self.materialize("__getitem__")[index]

    def expand(self, *sizes):
        sizes = tuple(sizes[0]) if len(sizes) == 1 else sizes
        same = len(sizes) == 5 and sizes[:2] == self.shape[:2] and sizes[3:] == self.shape[3:]
        if self.form is Form.BEFORE_EXPAND and same:
            return self._with(sizes, sizes[2], Form.EXPANDED)
        return self.materialize("expand").expand(*sizes)

    def reshape(self, *shape):
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if self.form is Form.EXPANDED and shape == (self.shape[0], self.shape[1] * self.shape[2], *self.shape[3:]):
            return self._with(shape, self.repeat, Form.HEADS)
        return self.materialize("reshape").reshape(*shape)

    view = reshape

    def repeat_interleave(self, repeats, dim=None, **kwargs):
        if self.form is Form.HEADS and self.repeat == 1 and dim == 1 and isinstance(repeats, int):
            batch, heads, tokens, head_dim = self.shape
            return self._with((batch, heads * repeats, tokens, head_dim), repeats, Form.HEADS)
        return self.materialize("repeat_interleave").repeat_interleave(repeats, dim, **kwargs)

    def transpose(self, dim0: int, dim1: int):
        if self.form in (Form.HEADS, Form.TRANSPOSED) and {dim0 % 4, dim1 % 4} == {2, 3}:
            batch, heads, rows, columns = self.shape
            turned = Form.TRANSPOSED if self.form is Form.HEADS else Form.HEADS
            return self._with((batch, heads, columns, rows), self.repeat, turned)
        return self.materialize("transpose").transpose(dim0, dim1)

    # Everything else sees the dense tensor.
    def materialize(self, operation: str) -> Tensor:
        """The dense tensor in the present form; warns once per operation if that means dequantizing the history."""
        if not self.source.dense_is_free:
            _warn_dense(operation)
        dense = self.source.dense(self.kind)
        if self.form is Form.BEFORE_EXPAND:
            return dense[:, :, None]
        if self.form is Form.EXPANDED:
            return dense[:, :, None].expand(self.shape)
        if self.repeat > 1:
            dense = dense.repeat_interleave(self.repeat, 1)
        return dense.transpose(2, 3) if self.form is Form.TRANSPOSED else dense

    def to(self, *args, **kwargs):
        # Models that share keys and values between layers move them to the reader's device, mostly their own.
        wanted = [*args, *(kwargs.get(name) for name in ("device", "dtype") if kwargs.get(name) is not None)]
        if all(w == self.dtype if isinstance(w, torch.dtype) else _is_device(w, self.device) for w in wanted):
            return self
        return self.materialize("to").to(*args, **kwargs)

    def __getattr__(self, name: str):
        # Private and protocol names must not dequantize a whole history just to be probed for.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.materialize(name), name)

    def __rmatmul__(self, other):
        return torch.matmul(other, self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = None
        if func is F.scaled_dot_product_attention:
            result = _packed_sdpa(*args, **kwargs)
        elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            result = _packed_matmul(*args, **kwargs)
        elif func in (torch.transpose, Tensor.transpose) and isinstance(args[0], OscarKV):
            result = args[0].transpose(*args[1:], **kwargs)
        elif func is torch.repeat_interleave and isinstance(args[0], OscarKV):
            result = args[0].repeat_interleave(*args[1:], **kwargs)
        if result is not None:
            return result
        name = getattr(func, "__name__", "an operation")
        return func(*_densify(args, name), **_densify(kwargs, name))


def _arithmetic(name: str):
    def method(self, *args):
        return getattr(self.materialize(name), name)(*args)

    method.__name__ = name
    return method


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv pow rpow matmul neg abs and or eq ne lt le gt ge bool iter"
)
# Python looks operators up on the class, so __getattr__ never sees them.
for _name in _OPERATORS.split():
    setattr(OscarKV, f"__{_name}__", _arithmetic(f"__{_name}__"))
OscarKV.__hash__ = object.__hash__


def _densify(value, name: str):
    if isinstance(value, OscarKV):
        return value.materialize(name)
    if isinstance(value, (tuple, list)):
        return type(value)([_densify(item, name) for item in value])
    if isinstance(value, dict):
        return {key: _densify(item, name) for key, item in value.items()}
    return value


def _packed_sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Packed attention if this is a plain K and V pair of one view; None sends the caller to the dense path."""
    if not (isinstance(key, OscarKV) and isinstance(value, OscarKV)) or isinstance(query, OscarKV):
        return None
    view = key.source
    pair = view is value.source and (key.kind, value.kind) == ("k", "v") and key.repeat == value.repeat
    plain = key.form is Form.HEADS and value.form is Form.HEADS
    if not pair or not plain or dropout_p > 0 or isinstance(attn_mask, OscarKV):
        return None
    # Also when the dense path then does the attention: the mask tells where the rows of a padded batch begin.
    view.observe(mask=attn_mask)
    if not query.shape[1] % view.kv_heads:
        view.see_queries(query)
    if torch.is_grad_enabled() and (query.requires_grad or view.live is not None):
        return None
    if query.shape[1] % view.kv_heads or not (enable_gqa or query.shape[1] == key.shape[1]):
        return None
    return view.attend(query, attn_mask, is_causal, scale, key.repeat)


def _packed_matmul(left, right):
    """The two products of eager attention, scores q k^T and weighted sum p v; None sends the caller to the dense path."""
    if not isinstance(right, OscarKV) or isinstance(left, OscarKV) or left.dim() != 4:
        return None
    view = right.source
    if left.shape[1] != view.kv_heads * right.repeat:
        return None
    is_scores = right.kind == "k" and right.form is Form.TRANSPOSED
    is_sum = right.kind == "v" and right.form is Form.HEADS
    if is_sum:
        view.observe(weights=left)
    if is_scores:
        view.see_queries(left)
    if torch.is_grad_enabled() and (left.requires_grad or view.live is not None):
        return None
    if is_scores:
        return view.scores(left)
    return view.weighted_sum(left) if is_sum else None
