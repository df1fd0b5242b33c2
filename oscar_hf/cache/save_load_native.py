"""Layers of transformers' own inside a saved cache: sliding-window attention, linear attention, and layers that are both.

An attention part is saved as its last tokens in order, whatever buffer they were in, so that a growing and a static cache can
read each other's. Other kinds are refused: what they keep is not known here.
"""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, StaticLayer

from ..errors import CacheStateError
from ..transformers_compat.versions import native_layer_kinds
from .save_checks import DTYPES

_MAX_TENSORS = 64
_FLOATS = {name for dtype, name in DTYPES.items() if dtype.is_floating_point}


def state(index: int, layer) -> tuple[dict, dict[str, Tensor]]:
    """Record for the JSON and tensors of a layer. Raises CacheStateError for a kind that is not known."""
    if type(layer) not in native_layer_kinds():
        raise CacheStateError(
            f"layer {index} is a {type(layer).__name__}, whose state this package does not know how to save: use pickle"
        )
    record, tensors = {"kind": "native", "attends": isinstance(layer, CacheLayerMixin)}, {}
    if record["attends"]:
        record["tokens"] = int(layer.get_seq_length())
        if layer.is_initialized:
            keys, values = (_in_order(layer, states, record["tokens"]) for states in (layer.keys, layer.values))
            tensors |= {"keys": keys, "values": values}
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        # Past states that were recorded for a rollback are more than a next call needs.
        record["linear"] = {str(i): _linear_facts(layer, i, tensors) for i in range(layer.number_of_states)}
    return record, tensors


def _in_order(layer, states: Tensor, tokens: int) -> Tensor:
    """The tokens that the layer still has, oldest first."""
    if isinstance(layer, StaticLayer):
        return states[:, :, : min(tokens, states.shape[2])]
    window = getattr(layer, "sliding_window", None)
    return states if window is None else states[:, :, max(0, states.shape[2] - window + 1) :]


def _linear_facts(layer, i: int, tensors: dict) -> dict:
    facts = {"has_previous_state": bool(layer.has_previous_state[i]), "conv_kernel_size": layer.conv_kernel_size[i]}
    if layer.is_conv_states_initialized[i]:
        tensors[f"conv.{i}"] = layer.conv_states[i][..., -layer.conv_kernel_size[i] :]
    if layer.is_recurrent_states_initialized[i]:
        tensors[f"recurrent.{i}"] = layer.recurrent_states[i]
    return facts


def expected(path: Path, record: dict) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor as the header states them, which is all that is known of such layers, if the names
    are those that the record asks for."""
    linear = record.get("linear", {})
    allowed = {"keys", "values"} if record.get("attends") else set()
    if isinstance(linear, dict):
        allowed |= {f"{name}.{i}" for name in ("conv", "recurrent") for i in linear}
    try:
        with safe_open(path, framework="pt") as file:
            views = {name: file.get_slice(name) for name in list(file.keys())[:_MAX_TENSORS]}
            found = {name: (view.get_dtype(), tuple(view.get_shape())) for name, view in views.items()}
    except SafetensorError as error:
        raise CacheStateError(f"{path} is not a sound safetensors file ({error}): save the cache again") from None
    if not set(found) <= allowed or any(dtype not in _FLOATS for dtype, _ in found.values()):
        raise CacheStateError(
            f"{path} holds {found}, allowed are floating tensors {sorted(allowed)}: save the cache again"
        )
    if ("keys" in found) != ("values" in found):
        raise CacheStateError(f"{path} holds only one of keys and values: save the cache again")
    return found


def restore(index: int, layer, record: dict, tensors: dict[str, Tensor]) -> None:
    """Put a saved state into a fresh layer."""
    where = f"layer {index} ({type(layer).__name__})"
    attends, linear = isinstance(layer, CacheLayerMixin), isinstance(layer, LinearAttentionCacheLayerMixin)
    if type(layer) not in native_layer_kinds() or attends != record.get("attends") or linear != ("linear" in record):
        raise CacheStateError(f"{where}: another kind of layer was saved: it was saved with another model")
    if attends and "keys" in tensors:
        _restore_attention(where, layer, record.get("tokens"), tensors["keys"], tensors["values"])
    if linear:
        _restore_linear(where, layer, record["linear"], tensors)


def _restore_attention(where: str, layer, tokens, keys: Tensor, values: Tensor) -> None:
    window = getattr(layer, "sliding_window", None)
    static = isinstance(layer, StaticLayer)
    room = layer.max_cache_len if static else tokens if window is None else window - 1
    # A static layer hands over its whole window, a growing one all but the oldest token of it, which no new token sees.
    sound = isinstance(tokens, int) and not isinstance(tokens, bool) and keys.dim() == values.dim() == 4
    sound = sound and keys.shape[:3] == values.shape[:3] and keys.dtype == values.dtype
    if not sound or not keys.shape[2] <= tokens or keys.shape[2] < min(tokens, room - (1 if static else 0)):
        raise CacheStateError(
            f"{where}: {list(keys.shape)} keys do not stand for {tokens!r} tokens: save the cache again"
        )
    sliding = layer.is_sliding
    if static and not sliding and tokens > room:
        raise CacheStateError(f"{where}: {tokens} tokens were saved, max_cache_len is {room}: use a larger one")
    layer.lazy_initialization(keys[:, :, :0], values[:, :, :0])
    keys, values = (states[:, :, max(0, states.shape[2] - room) :] for states in (keys, values))
    if not static:
        layer.keys, layer.values = keys, values
        if sliding:
            layer.cumulative_length = tokens
        return
    # A full window ends with the newest token; one that is not full begins with the oldest.
    at = slice(room - keys.shape[2], room) if tokens >= room else slice(0, keys.shape[2])
    layer.keys[:, :, at], layer.values[:, :, at] = keys, values
    layer.cumulative_length.fill_(min(tokens, room))
    if sliding:
        layer.cumulative_length_int = tokens


def _restore_linear(where: str, layer, facts, tensors: dict[str, Tensor]) -> None:
    if not isinstance(facts, dict) or set(facts) != {str(i) for i in range(layer.number_of_states)}:
        raise CacheStateError(f"{where}: other linear states were saved: it was saved with another model")
    for i in range(layer.number_of_states):
        conv, recurrent, fact = tensors.get(f"conv.{i}"), tensors.get(f"recurrent.{i}"), facts[str(i)]
        size = fact.get("conv_kernel_size") if isinstance(fact, dict) else None
        if conv is not None:
            if size != conv.shape[-1]:
                raise CacheStateError(
                    f"{where}: conv_kernel_size {size!r} does not fit its states: save the cache again"
                )
            layer.lazy_initialization(conv_states=conv, state_idx=i)
            layer.conv_states[i].copy_(conv)
        if recurrent is not None:
            if layer.device is None:
                layer.device, layer.dtype = recurrent.device, recurrent.dtype
            layer.lazy_initialization(recurrent_states=recurrent, state_idx=i)
            layer.recurrent_states[i].copy_(recurrent)
        layer.has_previous_state[i] = bool(isinstance(fact, dict) and fact.get("has_previous_state"))
