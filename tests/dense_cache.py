"""DenseCache: an OscarCache whose `update` returns dense tensors, as a cache without handles would: the twin that tests compare
the packed path with."""

from oscar_hf import OscarCache
from oscar_hf.attention.kv_handle import OscarKV


class DenseCache(OscarCache):
    """The same tokens stored the same way; attention reads them dequantized."""

    def update(self, *args, **kwargs):
        """Add the tokens of a call; dense keys and values of the whole layer."""
        return tuple(
            handle.source.dense(handle.kind) if isinstance(handle, OscarKV) else handle
            for handle in super().update(*args, **kwargs)
        )
