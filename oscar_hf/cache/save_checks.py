"""Checks of a saved cache before anything of it is used: a folder may come from a stranger."""

import hashlib
import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..artifact.config import MAX_LAYERS
from ..artifact.recipes import OVERRIDABLE
from ..artifact.validate import INVERSE_TOLERANCE
from ..errors import CacheStateError, OscarError
from ..quantization.packed_rows import packed_shapes
from ..quantization.rotation import inverse_error
from ..transformers_compat import model_config as compat
from .layer import OscarLayer
from .static_layer import StaticOscarLayer

CACHE_FILE = "oscar_cache.json"
ARTIFACT_FOLDER = "artifact"
FORMAT_VERSION = 2
# Constants that a layer may have made from its sequence.
LEARNED = ("key_transform", "key_inverse", "key_metric")
# The sum of outer products of the queries seen so far.
QUERY_MOMENT = "query_moment"
# Fields of storage that version 1 did not have.
_SINCE_2 = {"key_center", "key_block"}
LAYER_FILE = re.compile(r"layer-[0-9]{5}[.]safetensors")
# safetensors' name of each dtype that is stored.
DTYPES = {
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.int16: "I16",
}  # fmt: skip
_MAX_JSON_BYTES = 64 << 20
# What the exact windows of one layer may take: they are allocated whole, whatever the file holds.
_MAX_WINDOW_BYTES = 16 << 30
_MAX_COUNT = 1 << 31

# Dtype (safetensors' name) and shape of each tensor of a layer's file.
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_json(directory: Path) -> dict:
    """The content of a folder's oscar_cache.json, with the fields that a saved cache has."""
    path = directory / CACHE_FILE
    if not path.is_file():
        raise CacheStateError(f"{directory} holds no {CACHE_FILE}: give a folder that cache.save_pretrained() wrote")
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise CacheStateError(
            f"{path} has {path.stat().st_size} bytes, allowed are {_MAX_JSON_BYTES}: it is not a saved cache"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CacheStateError(f"{path} is not valid JSON ({error}): save the cache again") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if version not in (1, FORMAT_VERSION) or isinstance(version, bool):
        raise CacheStateError(
            f"{path} has format_version {version!r}, this oscar_hf reads 1 and {FORMAT_VERSION}: update oscar_hf or save again"
        )
    model, layers = content.get("model"), content.get("layers")
    sound = (
        isinstance(model, dict)
        and _is_list(model.get("layer_types"), str)
        and isinstance(model.get("cache_fields"), dict)
        and isinstance(content.get("storage"), dict)
        and set(content["storage"]) == set(OVERRIDABLE) - (_SINCE_2 if version == 1 else set())
        and isinstance(content.get("artifact"), dict)
        and _is_list([content["artifact"].get(name) for name in ("source", "sha256")], str)
        and _is_list(layers, dict)
        and 0 < len(layers) <= MAX_LAYERS
    )
    if not sound:
        raise CacheStateError(f"{path} lacks fields of a saved cache or has them of wrong types: save the cache again")
    return content


def recorded_config(directory: Path, model: dict):
    """Stand-in for the model's config, of layers that this transformers can make."""
    types = model["layer_types"]
    try:
        config = compat.config_from_fields(len(types), types, model["cache_fields"])
        compat.native_layers(config)
    except (OscarError, AttributeError) as error:
        # A field that a kind of layer needs may be missing, too.
        raise CacheStateError(f"{directory / CACHE_FILE}: {error}") from None
    return config


def _is_list(value, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def check_file(path: Path, record: dict) -> None:
    """Refuse a layer's file that is not the one that was saved."""
    if not path.is_file():
        raise CacheStateError(f"{path} is missing: copy the whole folder, or save the cache again")
    if path.stat().st_size != record.get("bytes"):
        raise CacheStateError(
            f"{path} has {path.stat().st_size} bytes, {CACHE_FILE} says {record.get('bytes')}: copy it again"
        )
    if file_hash(path) != record.get("sha256"):
        raise CacheStateError(f"{path} is not the file that was saved (its SHA-256 differs): copy it again")


def read_tensors(path: Path, expected: Shapes, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a file, names, dtypes and shapes compared from its header before any is allocated."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            names = set(file.keys())
            if names != set(expected):
                raise CacheStateError(
                    f"{path} holds {sorted(names)}, expected are {sorted(expected)}: save the cache again"
                )
            for name, (dtype, shape) in expected.items():
                view = file.get_slice(name)
                got = (view.get_dtype(), tuple(view.get_shape()))
                if got != (dtype, shape):
                    raise CacheStateError(
                        f"{path}: {name} is {got[0]} {list(got[1])}, expected is {dtype} {list(shape)}: save the cache again"
                    )
            return {name: file.get_tensor(name) for name in expected}
    except SafetensorError as error:
        raise CacheStateError(f"{path} is not a sound safetensors file ({error}): save the cache again") from None


def record_dtype(where: str, record: dict) -> torch.dtype:
    """The model's dtype that a layer's record names."""
    name = record.get("dtype")
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES if dtype.is_floating_point)
        raise CacheStateError(f"{where}: dtype is {name!r}, allowed are {allowed}")
    return found


def check_record(where: str, layer: OscarLayer, record: dict) -> None:
    """Every number of a layer's record, before anything is allocated from it."""
    least_of = {"tokens": 1, "history": 0, "batch_size": 1, "kv_heads": 1, "key_dim": 8, "value_dim": 8, "queries": 0}
    for name, least in least_of.items():
        # Version 1 knew of no queries.
        value = record.get(name, 0 if name == "queries" else None)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_COUNT:
            raise CacheStateError(
                f"{where}: {name} is {value!r}, allowed are integers from {least} on: save the cache again"
            )
    dtype, store = record_dtype(where, record), layer.store
    tokens, history, starts = record["tokens"], record["history"], record.get("starts")
    recent = max(0, tokens - store.sink) - history
    if not 0 <= recent <= store.ring_size:
        raise CacheStateError(
            f"{where}: {tokens} tokens of which {history} are packed do not fit windows of {store.sink} and {store.ring_size} "
            "tokens: save the cache again"
        )
    sound = starts is None or (_is_list(starts, int) and len(starts) == record["batch_size"] and any(starts))
    if (
        not sound
        or any(not 0 <= start < _MAX_COUNT for start in starts or ())
        or record.get("starts_known") not in (True, False)
    ):
        raise CacheStateError(f"{where}: starts {starts!r} are not one slot per row of the batch: save the cache again")
    if record.get("learned", False) not in (True, False):
        raise CacheStateError(
            f"{where}: learned is {record['learned']!r}, allowed are true and false: save the cache again"
        )
    if isinstance(layer, StaticOscarLayer) and tokens > layer.max_cache_len:
        raise CacheStateError(
            f"{where} holds {tokens} tokens, max_cache_len is {layer.max_cache_len}: use a larger one"
        )
    size = dtype.itemsize * (record["key_dim"] + record["value_dim"])
    if record["batch_size"] * record["kv_heads"] * (store.sink + store.ring_size) * size > _MAX_WINDOW_BYTES:
        raise CacheStateError(
            f"{where}: the windows would take more than {_MAX_WINDOW_BYTES >> 30} GiB: save the cache again"
        )


def expected_tensors(layer: OscarLayer, record: dict) -> Shapes:
    """Dtype and shape of each tensor of a packed layer."""
    store, tokens, history = layer.store, record["tokens"], record["history"]
    rows = (record["batch_size"], record["kv_heads"])
    dtype = DTYPES[getattr(torch, record["dtype"])]
    sink = min(store.sink, tokens) if record["starts"] is None else store.sink
    recent = max(0, tokens - store.sink) - history
    expected: Shapes = {}
    for name in ("key", "value"):
        dim = record[f"{name}_dim"]
        form = layer.config.side_format(name, dim)
        shapes = packed_shapes(*rows, dim, form.group_size, form.symmetric, history, form.center_block)
        expected |= {f"{name}_{part}": (DTYPES[kind], shape) for part, (kind, shape) in shapes.items()}
        expected[f"sink_{name}s"] = (dtype, (*rows, sink, dim))
        expected[f"recent_{name}s"] = (dtype, (*rows, recent, dim))
    square = ("F32", (record["kv_heads"], record["key_dim"], record["key_dim"]))
    if record.get("learned"):
        expected |= dict.fromkeys(LEARNED if layer.config.key_rule.needs_metric else LEARNED[:2], square)
    if record.get("queries"):
        expected[QUERY_MOMENT] = square
    return expected


def check_values(path: Path, tensors: dict[str, Tensor]) -> None:
    """Refuse scales and mins that no quantizer gives."""
    for name, tensor in tensors.items():
        if name.endswith(("_scale", "_min", "_centers")) and not torch.isfinite(tensor).all():
            raise CacheStateError(f"{path}: {name} holds NaN or infinite values: save the cache again")
        if name.endswith("_scale") and not (tensor > 0).all():
            raise CacheStateError(f"{path}: {name} holds values that are not positive: save the cache again")


def check_learned(path: Path, tensors: dict[str, Tensor], must_learn: bool) -> None:
    """Refuse constants that are no transform and its inverse, that are missing, or that no cache of this artifact learns."""
    if must_learn != ("key_transform" in tensors) or (QUERY_MOMENT in tensors and not must_learn):
        raise CacheStateError(
            f"{path} {'lacks' if must_learn else 'holds'} constants that a cache learns from its sequence, which "
            f"this artifact {'needs' if must_learn else 'does not'}: save the cache again"
        )
    if not must_learn:
        return
    for name in (*LEARNED, QUERY_MOMENT):
        if name in tensors and not torch.isfinite(tensors[name]).all():
            raise CacheStateError(f"{path}: {name} holds NaN or infinite values: save the cache again")
    if inverse_error(tensors["key_transform"], tensors["key_inverse"]) > INVERSE_TOLERANCE:
        raise CacheStateError(f"{path}: key_transform and key_inverse do not give the identity: save the cache again")


def check_same_model(directory: Path, config, index: int, record: dict) -> None:
    """Refuse a config of other heads than were saved, where it states them."""
    try:
        geometry = compat.layer_geometry(config, index)
    except OscarError:
        return
    saved = tuple(record.get(name) for name in ("kv_heads", "key_dim", "value_dim"))
    wanted = (geometry.kv_heads, geometry.key_dim, geometry.value_dim)
    if saved != wanted:
        raise CacheStateError(
            f"{directory}, layer {index}: (KV heads, key dim, value dim) = {saved} were saved, this model has {wanted}: it was "
            "saved with another model"
        )


def check_lengths(directory: Path, cache) -> None:
    """Refuse layers that hold different numbers of tokens or rows."""
    attending = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    lengths = {int(layer.get_seq_length()) for layer in attending}
    batches = {layer.batch_size for layer in cache.oscar_layers}
    if len(lengths) > 1 or len(batches) > 1:
        raise CacheStateError(
            f"{directory}: the layers hold {sorted(lengths)} tokens of {sorted(batches)} rows: save the cache again"
        )
