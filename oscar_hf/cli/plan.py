"""`oscar-hf plan`: what OscarCache would do with each layer of a model, and what it would take, from the config alone.

Nothing is estimated twice: the layers are OscarCache's own, allocated on the meta device.
"""

import dataclasses
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AutoConfig, PreTrainedConfig

from ..artifact.artifact import Artifact
from ..cache.layer import OscarLayer
from ..cache.oscar_cache import OscarCache
from ..checks import check_token_count
from ..defaults import PLAN_CONTEXT
from ..errors import OscarError, first_line
from ..kernels.decode import decode_problem
from ..storage.layer_store import LayerStore
from ..transformers_compat import model_config as compat
from ..transformers_compat.versions import supports_sdpa
from .loading import gguf_hint

FUSED, PYTORCH, NATIVE = "fused", "PyTorch", "native"
_FUSED_WHERE = "decode steps read packed data in one kernel on a CUDA GPU, under sdpa or a registered flash attention"
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class LayerPlan:
    """What OscarCache would do with one layer. Bytes are for a batch of one in bfloat16.

    Attributes:
        type (`str`): Kind of the layer, as transformers names it.
        path (`str`): `"fused"` if decode steps run in the kernel, `"PyTorch"` if packed data is read in plain PyTorch,
            `"native"` for transformers' own layer.
        why (`str`): More about that.
        kv_heads (`int`): KV heads; this and the following are 0 where nothing is kept per token.
        queries_per_head (`int`): Query heads that read one KV head.
        key_dim (`int`): Head dim of keys.
        value_dim (`int`): Head dim of values.
        group_size (`int`): Channels per scale.
        bits_per_element (`float`): Scales and minima included.
        token_bytes (`int`): Bytes of one more token.
        token_bytes_bf16 (`int`): The same in a DynamicCache.
        bytes (`int`): Bytes of the whole context.
        bytes_bf16 (`int`): The same in a DynamicCache.
    """

    type: str
    path: str
    why: str
    kv_heads: int = 0
    queries_per_head: int = 0
    key_dim: int = 0
    value_dim: int = 0
    group_size: int = 0
    bits_per_element: float = 0.0
    token_bytes: int = 0
    token_bytes_bf16: int = 0
    bytes: int = 0
    bytes_bf16: int = 0


@dataclass(frozen=True)
class Plan:
    """What OscarCache would do with a model; print it for a table.

    Attributes:
        model (`str`): Name of the model.
        model_type (`str`): Its family, as transformers names it.
        artifact (`str`): Where the artifact is from.
        context (`int`): Tokens that are counted for.
        is_static (`bool`): Whether a static cache is planned.
        layers (`list[LayerPlan]`): One per cache layer.
        constants (`int`): Bytes of the transforms and metrics; they are in no other sum.
        is_learned (`bool`): Whether each cache makes those from its prompt; else all caches of a model share them.
        notes (`list[str]`): What else there is to know.
    """

    model: str
    model_type: str
    artifact: str
    context: int
    is_static: bool
    layers: list[LayerPlan]
    constants: int
    is_learned: bool
    notes: list[str]

    @property
    def totals(self) -> dict[str, float]:
        """Bytes of all layers, without constants, and how many times smaller that is than BF16."""
        sums = {
            name: sum(getattr(layer, name) for layer in self.layers)
            for name in ("token_bytes", "token_bytes_bf16", "bytes", "bytes_bf16")
        }
        return sums | {"ratio": sums["bytes_bf16"] / sums["bytes"] if sums["bytes"] else 1.0}

    def as_dict(self) -> dict:
        """Plain dict for JSON."""
        return dataclasses.asdict(self) | {"totals": self.totals}

    def __str__(self) -> str:
        return _table(self)


def plan(
    name: str,
    *,
    artifact: str | None = None,
    context: int | None = None,
    max_cache_len: int | None = None,
    revision: str | None = None,
    gguf_file: str | None = None,
    subfolder: str | None = None,
) -> Plan:
    """Say what OscarCache would do with each layer of a model, and what it would take, from the model's config alone.

    Args:
        name (`str`): Folder or Hub repository id of a model; only its config is read.
        artifact (`str`, *optional*): Folder or Hub repository id. Defaults to the recipe `default`.
        context (`int`, *optional*): Tokens to count for. Defaults to what the model takes, at most 32768.
        max_cache_len (`int`, *optional*): Plan a static cache of that many tokens instead.
        revision (`str`, *optional*): Branch, tag or commit of the model on the Hub.
        gguf_file (`str`, *optional*): Read the config from this GGUF file of the folder or repository.
        subfolder (`str`, *optional*): Folder of the artifact inside its repository.

    Returns:
        `Plan`: Layer by layer, with sums.

    Raises:
        `OscarError`: If the config cannot be read, or OscarCache would refuse the model, with its reason.

    Example:

    ```python
    from oscar_hf import plan

    print(plan("Qwen/Qwen3-8B", context=131072))
    ```
    """
    if not isinstance(name, (str, os.PathLike)):
        raise OscarError(f"a model is named by a folder or a Hub repository id, got a {type(name).__name__}")
    try:
        options = {"gguf_file": gguf_file} if gguf_file else {}
        config = AutoConfig.from_pretrained(name, revision=revision, **options)
    except Exception as error:
        # Configs come from strangers, and transformers checks them with exceptions of many kinds.
        reason = first_line(error) + gguf_hint(name, gguf_file)
        raise OscarError(f"cannot read the config of {name!r}: {reason}") from error
    loaded = Artifact.load(artifact, subfolder=subfolder) if artifact else Artifact.data_free()
    return plan_config(config, loaded, name, context=context, max_cache_len=max_cache_len)


def plan_config(
    config: PreTrainedConfig,
    artifact: Artifact,
    name: str = "",
    *,
    context: int | None = None,
    max_cache_len: int | None = None,
) -> Plan:
    """`plan` of a config that is there already."""
    if context is not None:
        check_token_count("context", context)
    decoder = compat.text_config(config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = OscarCache(config, artifact=artifact, max_cache_len=max_cache_len)
    notes = [str(w.message).removeprefix("oscar_hf: ") for w in caught if str(w.message).startswith("oscar_hf: ")]
    context = max_cache_len or context or compat.longest_context(decoder, PLAN_CONTEXT)
    eager = "packed, but transformers offers the model no sdpa attention, and eager attention runs in PyTorch"
    eager = eager if supports_sdpa(config) is False else ""
    types = compat.layer_types(decoder)
    layers = []
    for index, (layer, kind) in enumerate(zip(cache.layers, types)):
        geometry = compat.layer_geometry(decoder, index)
        if isinstance(layer, OscarLayer):
            layers.append(_packed(layer, artifact, kind, geometry, context, eager))
        else:
            layers.append(_native(layer, kind, geometry, context))
    readers = (compat.shared_field(decoder, "num_hidden_layers") or 0) - len(layers)
    if readers > 0:
        notes.append(f"the last {readers} layers keep nothing: they read the keys and values of earlier layers")
    if compat.has_cross_attention(config):
        notes.append("self-attention of the decoder alone: pass EncoderDecoderCache(OscarCache(...), DynamicCache())")
    constants = dict(item for layer in cache.oscar_layers for item in layer.constants.storages.items())
    return Plan(
        model=name,
        model_type=decoder.model_type,
        artifact=artifact.source,
        context=context,
        is_static=max_cache_len is not None,
        layers=layers,
        constants=sum(constants.values()),
        is_learned=any(layer.store.statistics is not None for layer in cache.oscar_layers),
        notes=notes,
    )


def _packed(
    layer: OscarLayer, artifact: Artifact, kind: str, geometry: compat.Geometry, context: int, eager: str
) -> LayerPlan:
    states = tuple(
        torch.empty(1, geometry.kv_heads, 1, dim, dtype=_DTYPE, device="meta")
        for dim in (geometry.key_dim, geometry.value_dim)
    )
    layer.lazy_initialization(*states)
    # A growing layer of the same kind answers for the kernel: it does not ask the device for its lengths.
    twin = OscarLayer(layer.config, artifact, layer.layer_idx)
    twin.lazy_initialization(*states)
    query = torch.empty(1, geometry.query_heads, 1, geometry.key_dim, dtype=_DTYPE, device="meta")
    why = eager or decode_problem(query, twin.store.decode_store())
    store = layer.store
    for side in store.sides:
        side.rows.reserve(max(0, context - store.sink - store.ring_size))
    elements = geometry.kv_heads * (geometry.key_dim + geometry.value_dim)
    stored = _bytes_per_token(twin.store)
    return LayerPlan(
        type=kind,
        path=PYTORCH if why else FUSED,
        why=why or _FUSED_WHERE,
        **_sizes(geometry),
        group_size=store.keys.format.group_size,
        bits_per_element=8 * stored / elements,
        token_bytes=round(stored),
        token_bytes_bf16=2 * elements,
        bytes=sum(size for region, size in store.region_bytes().items() if region != "constants"),
        bytes_bf16=2 * elements * context,
    )


def _sizes(geometry: compat.Geometry) -> dict[str, int]:
    """The fields of a LayerPlan that follow from a layer's geometry."""
    return {
        "kv_heads": geometry.kv_heads,
        "queries_per_head": geometry.query_heads // geometry.kv_heads,
        "key_dim": geometry.key_dim,
        "value_dim": geometry.value_dim,
    }


def _bytes_per_token(store: LayerStore) -> float:
    """Bytes that one packed token takes in an empty growing store."""
    total = 0
    for side in store.sides:
        side.rows.reserve(1)
        total += (side.rows.code_bytes + side.rows.qparam_bytes) // side.rows.capacity
        if side.center_block:
            total += 2 * side.dim * store.kv_heads / side.center_block
    return total


def _native(layer, kind: str, geometry: compat.Geometry, context: int) -> LayerPlan:
    kept, has_state = compat.native_tokens(layer, context)
    why = "transformers' own layer" + (" with a state of fixed size, which is not counted" if has_state else "")
    if not kept:
        return LayerPlan(type=kind, path=NATIVE, why=why)
    elements = geometry.kv_heads * (geometry.key_dim + geometry.value_dim)
    # A window that is full takes no more.
    more = 2 * elements if kept == context else 0
    return LayerPlan(
        type=kind,
        path=NATIVE,
        why=why,
        **_sizes(geometry),
        bits_per_element=16.0,
        token_bytes=more,
        token_bytes_bf16=more,
        bytes=2 * elements * kept,
        bytes_bf16=2 * elements * kept,
    )


# ------------------------------------------------------------------------------------------------------ printing
def _runs(layers: list[LayerPlan], key: Callable) -> list[tuple[str, list[LayerPlan]]]:
    """Neighboring layers with equal keys: their label, and they."""
    runs: list[tuple[int, list[LayerPlan]]] = []
    for index, layer in enumerate(layers):
        if runs and key(runs[-1][1][0]) == key(layer):
            runs[-1][1].append(layer)
        else:
            runs.append((index, [layer]))
    return [(str(first) if len(run) == 1 else f"{first}-{first + len(run) - 1}", run) for first, run in runs]


def _table(plan: Plan) -> str:
    kind = f"static cache of {plan.context:,} tokens" if plan.is_static else f"{plan.context:,} tokens"
    lines = [
        f"{plan.model} ({plan.model_type}), {len(plan.layers)} layers, {plan.artifact}: {kind}, batch 1, bfloat16",
        f"{'layers':>9}  {'type':<18}{'path':<9}{'KV heads':>8}{'g':>4}{'head dim':>9}{'group':>6}{'bits':>6}"
        f"{'B/token':>9}{'BF16':>8}{'total':>13}{'BF16':>13}",
    ]
    for label, run in _runs(plan.layers, lambda layer: layer):
        layer, each = run[0], " each" if len(run) > 1 else ""
        lines.append(f"{label:>9}  {layer.type[:17]:<18}{layer.path:<9}{_cells(layer)}{each}")
    totals = plan.totals
    lines.append(
        f"{'all':>9}  {'':<60}{totals['token_bytes']:>9,}{totals['token_bytes_bf16']:>8,}"
        f"{_mib(totals['bytes']):>13}{_mib(totals['bytes_bf16']):>13}"
    )
    ratio = totals["ratio"]
    change = f"{ratio:.2f}x smaller than BF16" if ratio > 1 else f"{1 / ratio:.2f}x larger than BF16"
    change = "as large as BF16" if ratio == 1 else change
    owner = "are each cache's own" if plan.is_learned else "come once per model"
    lines.append(f"{change}; the rotations, {_mib(plan.constants)}, {owner} and are not counted")
    reasons = dict.fromkeys((layer.path, layer.why) for layer in plan.layers if layer.why)
    lines += [f"{path}: {why}" for path, why in reasons]
    return "\n".join(lines + [f"note: {note}" for note in plan.notes])


def _cells(layer: LayerPlan) -> str:
    if not layer.kv_heads:
        return f"{'-':>8}{'-':>4}{'-':>9}{'-':>6}{'-':>6}{0:>9}{0:>8}{'-':>13}{'-':>13}"
    dims = str(layer.key_dim) if layer.key_dim == layer.value_dim else f"{layer.key_dim}/{layer.value_dim}"
    return (
        f"{layer.kv_heads:>8}{layer.queries_per_head:>4}{dims:>9}{layer.group_size or '-':>6}{layer.bits_per_element:>6.2f}"
        f"{layer.token_bytes:>9,}{layer.token_bytes_bf16:>8,}{_mib(layer.bytes):>13}{_mib(layer.bytes_bf16):>13}"
    )


def _mib(count: float) -> str:
    return f"{count / 2**20:,.2f} MiB"
