"""DenseCache: an OscarCache whose `update` returns dense tensors, as a cache without handles would: the twin that tests compare
the packed path with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from oscar_hf import OscarCache
from oscar_hf.attention.kv_handle import OscarKV

# What handles follow; with anything else they become dense tensors, of which nothing is known.
_VIEWS = (
    Tensor.transpose, torch.transpose, Tensor.expand, Tensor.reshape, Tensor.contiguous, Tensor.__getitem__,
    Tensor.repeat_interleave, torch.repeat_interleave,
)  # fmt: skip
_PRODUCTS = (F.scaled_dot_product_attention, torch.matmul, Tensor.matmul, Tensor.__matmul__)


class DenseCache(OscarCache):
    """The same tokens stored the same way; attention reads them dequantized, and its queries are told to the cache unless
    `is_plain`."""

    is_plain = False

    def update(self, *args, **kwargs):
        """Add the tokens of a call; dense keys and values of the whole layer."""
        handles = super().update(*args, **kwargs)
        return tuple(self._dense(handle) if isinstance(handle, OscarKV) else handle for handle in handles)

    def _dense(self, handle: OscarKV) -> Tensor:
        dense = handle.source.dense(handle.kind)
        return dense if self.is_plain or handle.kind == "v" else _Watched.of(dense, handle.source)


class _Watched(Tensor):
    """Dense keys that tell their view which queries they are multiplied by."""

    @classmethod
    def of(cls, dense: Tensor, view) -> "_Watched":
        watched = dense.as_subclass(cls)
        watched.view_of_call = view
        return watched

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        view = next((x.view_of_call for x in (*args, *kwargs.values()) if isinstance(x, cls)), None)
        plain = [x.as_subclass(Tensor) if isinstance(x, cls) else x for x in args]
        named = {name: x.as_subclass(Tensor) if isinstance(x, cls) else x for name, x in kwargs.items()}
        if func in _PRODUCTS and view is not None and not isinstance(args[0], cls):
            # No mask comes: the padding was stated, or there is none.
            view.observe()
            view.see_queries(plain[0])
        result = func(*plain, **named)
        # To where it is already, in the dtype that it has: models that share keys between layers do that.
        stays = func is Tensor.to and (result.dtype, result.device) == (args[0].dtype, args[0].device)
        return cls.of(result, view) if (func in _VIEWS or stays) and isinstance(args[0], cls) else result
