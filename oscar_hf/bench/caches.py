"""The caches that a bench compares, by name, and how they are filled without running a model."""

import torch
import torch.nn.functional as F
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from ..artifact.artifact import Artifact
from ..cache.layer import OscarLayer
from ..cache.oscar_cache import OscarCache
from ..errors import OscarError
from .models import states_shape

QUANTIZED = {"quantized-quanto": is_optimum_quanto_available, "quantized-hqq": is_hqq_available}
KINDS = ("dynamic", "static", *QUANTIZED, "oscar", "oscar-static")
# `quantized` stands for every backend that is installed.
CHOICES = ("dynamic", "static", "quantized", *QUANTIZED, "oscar", "oscar-static")
STATIC = ("static", "oscar-static")
# transformers' quantized caches are compared at OscarCache's number of bits (their default is 4).
QUANTIZED_BITS = 2
# A static cache's length is rounded up to this: attention with a mask of another length would copy it.
LENGTH_MULTIPLE = 128


def choose(names: list[str]) -> tuple[list[str], str]:
    """(kinds, a line about those left out because they need a package that is not there, or an empty string)."""
    wanted = [kind for name in names for kind in (QUANTIZED if name == "quantized" else (name,))]
    missing = [kind for kind in wanted if kind in QUANTIZED and not QUANTIZED[kind]()]
    kinds = list(dict.fromkeys(kind for kind in wanted if kind not in missing))
    note = f"left out, not installed: {', '.join(dict.fromkeys(missing))}" if missing else ""
    if not kinds:
        raise OscarError(f"no cache is left to measure ({note}): pip install optimum-quanto or hqq, or name others")
    return kinds, note


def static_length(tokens: int) -> int:
    """max_cache_len of a static cache that is to hold `tokens` tokens."""
    return -(-tokens // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def new_cache(kind: str, model, artifact: Artifact, tokens: int):
    """An empty cache of a kind for a model; static ones have room for `tokens` tokens."""
    config = model.config
    if kind == "dynamic":
        return DynamicCache(config=config)
    if kind == "static":
        return StaticCache(config=config, max_cache_len=static_length(tokens))
    if kind == "oscar":
        return OscarCache(config, artifact=artifact)
    if kind == "oscar-static":
        return OscarCache(config, artifact=artifact, max_cache_len=static_length(tokens))
    return QuantizedCache(backend=kind.removeprefix("quantized-"), config=config, nbits=QUANTIZED_BITS)


def settle(cache) -> None:
    """Let an OscarCache pack what it kept exact for the call, as its next update would; others have nothing to do."""
    if isinstance(cache, OscarCache):
        cache.commit()


def filled(kind: str, model, artifact: Artifact, tokens: int, batch: int, room: int):
    """A cache that holds `tokens` random tokens in each of `batch` equal rows, and has room for `room` in all.

    The tokens go through `layer.update` and depend on the layer alone, so every kind holds the same. Only one row is ever
    quantized: OscarCache's are copies of it.
    """
    cache = new_cache(kind, model, artifact, room)
    ours = isinstance(cache, OscarCache)
    _update(cache, model, tokens, 1 if ours else batch)
    if ours and batch > 1:
        cache.batch_repeat_interleave(batch)
    return cache


@torch.no_grad()
def _update(cache, model, tokens: int, batch: int) -> None:
    heads, dim = states_shape(model.config)
    parameter = next(model.parameters())
    for index, layer in enumerate(cache.layers):
        generator = torch.Generator(parameter.device).manual_seed(index)
        states = (
            torch.randn(1, heads, tokens, dim, device=parameter.device, dtype=parameter.dtype, generator=generator)
            for _ in range(2)
        )
        layer.update(*(x.expand(batch, -1, -1, -1) for x in states))
        if isinstance(layer, OscarLayer):
            # One layer at a time holds its tokens in full, as in a forward.
            layer.store.place_waiting()


@torch.no_grad()
def attention_error(cache: OscarCache, query_heads: int) -> float:
    """Error ||x - ref|| / ||ref|| of attention over what the first packed layer holds, one more token included, against
    float32 attention on the same tokens dequantized to the model's dtype; of the first row. It uses the layer up: only that
    row is left."""
    layer = cache.oscar_layers[0]
    shape, generator = (layer.batch_size, layer.store.kv_heads, 1), torch.Generator(layer.device).manual_seed(0)

    def normal(heads: int, dim: int):
        return torch.randn(shape[0], heads, 1, dim, device=layer.device, dtype=layer.dtype, generator=generator)

    key_dim, value_dim = layer.store.keys.sink.shape[3], layer.store.values.sink.shape[3]
    keys, values = layer.update(normal(shape[1], key_dim), normal(shape[1], value_dim))
    query = normal(query_heads, key_dim)
    output = F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)[0].float()
    layer.batch_select_indices(torch.zeros(1, dtype=torch.int64))
    group = query_heads // shape[1]
    dense = (layer.store.dense(kind).float().repeat_interleave(group, 1) for kind in "kv")
    expected = F.scaled_dot_product_attention(query[:1].float(), *dense)[0]
    return ((output - expected).norm() / expected.norm()).item()
