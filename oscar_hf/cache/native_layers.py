"""Operations on transformers' own layers beside ours, where these lack them, do half of them, or do them wrong."""

import copy

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, StaticLayer

from ..errors import CacheStateError


def tensors_of(layer) -> list[Tensor]:
    """Tensors that a layer holds, also inside its dicts of states."""
    found = []
    for value in vars(layer).values():
        parts = value.values() if isinstance(value, dict) else (value,)
        found += [part for part in parts if isinstance(part, Tensor) and part.numel() > 1]
    return found


def blank_copy(layer) -> dict:
    """The state of a layer that has not been used yet, for `forget`."""
    return copy.deepcopy(vars(layer))


def forget(layer, blank: dict) -> None:
    """Make a growing layer what it was before its first token. Its own `reset` only zeroes tensors: a next sequence would
    attend to as many zero keys as there were tokens, and its batch could not have another size."""
    record_past = getattr(layer, "record_past", None)
    vars(layer).clear()
    vars(layer).update(copy.deepcopy(blank))
    if record_past is not None:
        layer.record_past = record_past


def row_indices(given, rows: int) -> Tensor:
    """Which of so many rows are meant, whole numbers from 0 on: by number, from the end if negative, or by a bool mask. Raises
    CacheStateError, before anything has changed, for rows that are not there, and for none."""
    try:
        indices = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        indices = torch.zeros(0, 0)
    is_mask = indices.dtype == torch.bool
    is_number = not (is_mask or indices.is_floating_point() or indices.is_complex())
    if indices.dim() != 1 or not (is_number or (is_mask and len(indices) == rows)):
        raise CacheStateError(
            f"rows of the batch are chosen by a list of whole numbers or a bool mask of {rows} entries, got "
            f"{type(given).__name__}{list(indices.shape)} of {indices.dtype}"
        )
    if is_mask:
        indices = indices.nonzero()[:, 0]
    wrong = [index for index in indices.tolist() if not -rows <= index < rows]
    if wrong or not len(indices):
        raise CacheStateError(
            f"the batch has {rows} rows: there is no row {wrong[0]}" if wrong else "no row would be left"
        )
    return torch.where(indices < 0, indices + rows, indices)


def select_rows(layer, indices: Tensor) -> None:
    """Keep the rows `indices` of the batch. Linear layers have no such operation (those that hold attention, too, inherit
    one that leaves their states alone), static ones none either: reordering is the same gather."""
    tensors = tensors_of(layer)
    if not tensors:
        return
    rows = tensors[0].shape[0]
    if indices.dtype == torch.bool:
        indices = indices.nonzero()[:, 0]
    indices = torch.where(indices < 0, indices + rows, indices)
    layer.reorder_cache(indices.to(tensors[0].device))
    if hasattr(layer, "batch_size"):
        layer.batch_size = len(indices)


def repeat_rows(layer, repeats: int) -> None:
    """Repeat each row of the batch `repeats` times."""
    if tensors := tensors_of(layer):
        select_rows(layer, torch.arange(tensors[0].shape[0]).repeat_interleave(repeats))


def check_croppable(index: int, layer) -> None:
    """Raise CacheStateError if a layer could not be put back as it was, before any other layer has been cropped."""
    name = f"layer {index} ({type(layer).__name__})"
    if isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.is_recurrent_states_initialized.values()):
        raise CacheStateError(
            f"{name} holds a recurrent state, from which no token can be removed: nothing was cropped; copy the cache before "
            "the tokens that may have to go (copy.deepcopy)"
        )
    # Since 5.24 static layers have a crop; that of a sliding one is right only where the window holds the whole sequence.
    if not hasattr(layer, "crop") or (isinstance(layer, StaticLayer) and not layer.is_croppable):
        raise CacheStateError(
            f"{name} of this static cache cannot be cropped, and nothing was: use a growing cache (leave max_cache_len out)"
        )
    window = getattr(layer, "sliding_window", None)
    if window is None or getattr(layer, "record_past", True):
        return
    if isinstance(layer, CacheLayerMixin) and layer.get_seq_length() >= window:
        raise CacheStateError(
            f"{name} keeps the last {window} tokens only, so none can be taken back, and nothing was cropped: call "
            "cache.activate_past_recording() before the tokens that may have to go, as assisted decoding does"
        )


def crop(layer, tokens_to_remove: int) -> None:
    """Remove the last -tokens_to_remove tokens, all of them if there are fewer: static layers would count below zero. A positive
    number is the length to keep."""
    if tokens_to_remove and isinstance(layer, CacheLayerMixin):
        held = int(layer.get_seq_length())
        tokens_to_remove = max(tokens_to_remove, -held) if tokens_to_remove < 0 else min(0, tokens_to_remove - held)
        if not tokens_to_remove and not getattr(layer, "record_past", False):
            return
    layer.crop(tokens_to_remove)
