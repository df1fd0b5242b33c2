"""Whether all layers of a cache hold the same text: what an interrupted or refused forward, or an operation that failed in the
middle, leaves behind is found before it is read as if it were whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from ..errors import CacheStateError
from .layer import OscarLayer
from .static_layer import StaticOscarLayer

# What models call on a cache to read and to change a linear layer's state. Before 5.24 a step changes the state itself, so that
# linear layers are seen in prompts alone, and are taken for written to when a layer after them is.
STATE_METHODS = [
    name
    for name in ("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state")
    if hasattr(Cache, name)
]
SEES_ALL_STATES = "get_conv_state" in STATE_METHODS
_WAY_OUT = "call cache.reset() or use a new cache"


class Wholeness:
    """What is known of the forwards that wrote to the layers of one cache.

    A forward writes to layers in their order, so a write to an earlier layer, or once more to the same, begins the next one. All
    layers that it writes to must hold as many tokens as its first one did. Layers that it leaves out (a draft of fewer layers)
    are not asked. States of linear layers count no tokens: where there are any, all layers must have been in the same forwards.

    The lengths of a static layer that takes steps are on the device. They are asked for only if the forward before did not come to
    its end, so that a step costs no wait.
    """

    def __init__(self, layers: list[CacheLayerMixin]):
        self._layers = layers
        self._last = max((i for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)), default=-1)
        self._linear = [i for i, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]
        self.forget()

    def forget(self) -> None:
        """All layers are empty."""
        self._problem = ""
        self._forward, self._latest, self._base = 0, -1, None
        self._written: set[tuple[int, str]] = set()
        self._looks, self._is_finished = False, True
        # The latest forward that each layer was in.
        self._forward_of = dict.fromkeys(range(len(self._layers)), 0)

    # -------------------------------------------------------------------------------------------------- forwards
    def begins(self, layer_idx: int, kind: str = "tokens") -> bool:
        """Whether a write to a layer begins a forward."""
        return layer_idx < self._latest or self._latest < 0 or (layer_idx, kind) in self._written

    def enter(self, layer_idx: int, kind: str = "tokens") -> bool:
        """A layer is about to be written to: tokens, or what `kind` names of a linear state. Returns whether a forward begins.
        Raises CacheStateError, before anything is written, if that would go on from an unfinished one."""
        begins = self.begins(layer_idx, kind)
        if begins:
            self.check_operation()
            self._check_states()
            self._looks = self._forward > 0 and not self._is_finished
            self._is_finished = False
        held = self._tokens(layer_idx) if kind == "tokens" else None
        if not begins and None not in (held, self._base) and held != self._base:
            raise CacheStateError(self._torn(layer_idx, held))
        if begins:
            self._forward, self._base = self._forward + 1, None
            self._written.clear()
        if self._base is None:
            self._base = held
        self._latest = layer_idx
        self._written.add((layer_idx, kind))
        self._forward_of[layer_idx] = self._forward
        if not SEES_ALL_STATES:
            self._forward_of.update({index: self._forward for index in self._linear if index < layer_idx})
        return begins

    def leave(self, layer_idx: int) -> None:
        """A layer has been written to."""
        if layer_idx == self._last:
            self._is_finished = True

    def _tokens(self, index: int) -> int | None:
        """Tokens of a layer; None where there is no number of them, or it would have to be asked for."""
        layer = self._layers[index]
        if isinstance(layer, StaticOscarLayer):
            store = layer.store
            if store.takes_steps:
                return int(store.regions.length) if self._looks else None
            return store.held
        if isinstance(layer, OscarLayer):
            return layer.store.held
        if not isinstance(layer, CacheLayerMixin):
            return None
        length = layer.get_seq_length()
        if isinstance(length, torch.Tensor):
            return int(length) if self._looks else None
        return length

    def _torn(self, index: int, held: int) -> str:
        crop = (
            f"cache.crop({min(held, self._base)}), which removes what not all layers hold, "
            if held and self._base
            else ""
        )
        return (
            f"layer {index} holds {held} tokens where the layers before it held {self._base}: an earlier forward was interrupted "
            f"or refused, or belonged to another model; call {crop}cache.reset(), or use a new cache"
        )

    def _check_states(self) -> None:
        if self._linear and len(set(self._forward_of.values())) > 1:
            raise CacheStateError(
                "an earlier forward was interrupted or refused: it changed the states of some linear layers, and not all of the "
                f"layers after them; {_WAY_OUT}"
            )

    # -------------------------------------------------------------------------------------------------- operations
    @contextmanager
    def changing(self, operation: str) -> Iterator[None]:
        """Within it layers are changed one after the other. What it raises, an interrupt as well, leaves the cache refused."""
        self.check_operation()
        self._problem = operation
        yield
        self._problem = ""

    def check_operation(self) -> None:
        """Raise CacheStateError if an operation stopped between the first layer and the last."""
        if self._problem:
            raise CacheStateError(
                f"an earlier {self._problem} stopped before all layers were changed, so they belong to different texts: {_WAY_OUT}"
            )

    def give_up(self, problem: str) -> None:
        """Refuse everything but `forget` from now on."""
        self._problem = problem

    def check_all(self) -> None:
        """Raise CacheStateError unless all layers hold the same text, as far as that can be said. Waits for the device where
        lengths are there."""
        self.check_operation()
        self._check_states()
        self._looks, self._base = True, None
        for index in range(len(self._layers)):
            held = self._tokens(index)
            if held is None or (not held and not self._base):
                # Layers that a model leaves out at its beginning.
                continue
            if self._base is not None and held != self._base:
                raise CacheStateError(self._torn(index, held))
            self._base = held


def watched(name: str) -> Callable:
    """A method of a cache that tells its Wholeness of a state that is read or changed, and then does what transformers' does."""
    place = int(name.startswith("update"))

    def method(self, *args, **kwargs):
        if not torch.compiler.is_compiling():
            layer_idx = kwargs["layer_idx"] if "layer_idx" in kwargs else args[place]
            state = kwargs.get("state_idx", args[place + 1] if len(args) > place + 1 else 0)
            self._whole.enter(layer_idx, f"{name} {state}")
        return getattr(Cache, name)(self, *args, **kwargs)

    method.__name__, method.__doc__ = name, "See transformers' Cache."
    return method
