"""What a cache watches for while a model writes to it: mistakes that would otherwise give wrong text without a word."""

import warnings

import torch
from torch import Tensor

from ..artifact.artifact import Artifact
from ..errors import CacheStateError
from ..storage.layer_store import LayerStore

# Fewer equal tokens at the start of two turns are likely chance (a BOS token, a chat header).
_REPEATED_TOKENS = 16
# Frames between a warning here and the model's own call of `update`, in Python's way of counting.
_STACK_LEVEL = 6


class Guards:
    """The checks, and what they remember between updates."""

    def __init__(self, artifact: Artifact, has_cross_attention: bool, layers: int, rope_switch: int | None = None):
        self._source, self._longest = artifact.source, artifact.config.longest_calibrated
        self._collapses = not artifact.config.center_block
        # With one layer two writes in a row are what two forwards do, so there it goes unnoticed.
        self._watches_cross_attention = has_cross_attention and layers > 1
        self._last_updated: int | None = None
        self._warned_of_length = False
        self._rope_switch = rope_switch

    def refuse_cross_attention(self, layer_idx: int, layer) -> None:
        """Raise CacheStateError if an encoder-decoder model was given a bare cache: it then writes to each layer twice in a row,
        self-attention and cross-attention."""
        if not self._watches_cross_attention:
            return
        again, self._last_updated = layer_idx == self._last_updated, layer_idx
        if again and layer.get_seq_length():
            raise CacheStateError(
                "this encoder-decoder model was given a bare OscarCache, which would mix its cross-attention into its "
                "self-attention; pass EncoderDecoderCache(OscarCache(model.config, ...), DynamicCache()) instead"
            )

    def warn_beyond_calibration(self, tokens: int, stacklevel: int = _STACK_LEVEL) -> None:
        """Say once that constants made from short sequences do not hold for long ones (keys drift with the position)."""
        if self._longest is None or tokens <= self._longest or self._warned_of_length:
            return
        self._warned_of_length = True
        warnings.warn(
            f"oscar_hf: this cache is to hold {tokens} tokens, but {self._source} was calibrated on positions up to "
            f"{self._longest}; beyond them quality {'can collapse' if self._collapses else 'may suffer'}: calibrate it on longer "
            "text (`oscar-hf calibrate --context N --tokens N`), or use no artifact",
            stacklevel=stacklevel,
        )

    def check_new_forward(self, first: LayerStore, value_states: Tensor) -> None:
        """At the start of a forward: warn if what comes is held already, or is longer than what was calibrated. first: the first
        packed layer's store, which is being written to."""
        held, new = first.held, value_states.shape[2]
        self.warn_beyond_calibration(held + new)
        if self._rope_switch and 0 < held <= self._rope_switch < held + new:
            warnings.warn(
                f"oscar_hf: beyond {self._rope_switch} tokens this model takes other rotary factors than those that the {held} "
                "tokens of the cache were made with: call cache.reset() and give the whole text for what the model says without "
                "a cache",
                stacklevel=_STACK_LEVEL,
            )
        if min(held, new) < _REPEATED_TOKENS or first.padding.is_padded:
            return
        batch, heads, _, dim = value_states.shape
        if (batch, heads, dim) != (first.batch_size, first.kv_heads, first.values.dim):
            return
        first.place_waiting()
        # Of a text of N tokens, fewer than are held, generate() passes those from held - N on, as new ones.
        offset, odd = divmod(held - new, 2)
        begins, equal = (0,) if odd or offset <= 0 else (0, offset), []
        for begin in begins:
            count = min(new, held - begin, max(_REPEATED_TOKENS, first.sink - begin))
            equal.append(_are_equal(value_states[:, :, :count], first.rows("v", begin, begin + count)))
        for begin, is_equal in zip(begins, torch.stack(equal).tolist()):
            if is_equal:
                warnings.warn(_again(held, begin), stacklevel=_STACK_LEVEL)
                return


def _are_equal(new: Tensor, stored: Tensor) -> Tensor:
    """Whether rows are the same but for what packing changes. Values of the first layer carry no positions, so the same tokens
    give the same rows; packed ones are off by a tenth of their variance, other tokens' by twice that variance."""
    new, stored = new.float(), stored.float()
    off = (new - stored).square().sum()
    spread = (stored - stored.mean(2, keepdim=True)).square().sum()
    return (off < 0.5 * spread) | ((off == 0) & (stored != 0).any())


def _again(held: int, begin: int) -> str:
    if not begin:
        return (
            "oscar_hf: these tokens begin like the ones that the cache holds already. A cache that was used for a prompt must not "
            "be given the same prompt again: give generate() the whole text and at least one new token, give the model itself only "
            "the new tokens, or call cache.reset() first"
        )
    return (
        f"oscar_hf: these tokens are those that the cache holds already from token {begin} on: generate() was given a text "
        f"shorter than the {held} tokens of the cache (a chat template that drops part of an earlier turn does that), and passes "
        "its middle as new. Call cache.reset() and give the whole text, or before generate() cache.crop(n) to the n tokens that "
        "both begin with"
    )
