"""Saved caches: an OscarCache in a folder, to be loaded again and continued.

A folder holds `oscar_cache.json` (geometry, lengths, starts, storage config, the identity of the artifact, size and SHA-256 of
every file), one `layer-NNNNN.safetensors` per layer with the tokens in use and no slack, and, unless it was left out, the
artifact in `artifact/`. The same folder serves growing and static caches. Writing and reading go layer by layer, so that one
layer at most is in memory twice. A folder may come from a stranger: everything is checked before it is used.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers.cache_utils import CacheLayerMixin

from ..artifact.artifact import Artifact
from ..artifact.config import MAX_LAYERS, OVERRIDABLE
from ..errors import ArtifactError, CacheStateError, OscarError
from ..quantization.packed_rows import PackedRows, tokens_per_row
from ..transformers_compat import model_config as compat
from . import save_load_native as saved_native
from .layer import OscarLayer
from .save_load_native import DTYPES
from .static_layer import StaticOscarLayer

CACHE_FILE = "oscar_cache.json"
ARTIFACT_FOLDER = "artifact"
FORMAT_VERSION = 1
_LAYER_FILE = re.compile(r"layer-[0-9]{5}[.]safetensors")
_MAX_JSON_BYTES = 64 << 20
# What the exact windows of one layer may take: they are allocated whole, whatever the file holds.
_MAX_WINDOW_BYTES = 16 << 30
_MAX_COUNT = 1 << 31


# ---------------------------------------------------------------------------------------------------------- identity
def artifact_hash(artifact: Artifact) -> str:
    """SHA-256 of what an artifact computes with: its config without provenance, and its constants."""
    fields = dataclasses.asdict(artifact.config)
    for name in ("calibration", "base_model", "base_model_revision"):
        fields.pop(name)
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for layer, constants in sorted(artifact.layers.items()):
        for name, tensor in sorted(constants.tensors().items()):
            digest.update(f"{layer}.{name}{list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy())
    return digest.hexdigest()


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _layer_file(index: int) -> str:
    return f"layer-{index:05d}.safetensors"


# ---------------------------------------------------------------------------------------------------------- save
def save(cache, directory: str | os.PathLike, include_artifact: bool = True) -> Path:
    """Write a cache to a folder; an interruption leaves what was there before. See `OscarCache.save_pretrained`."""
    given, directory = Path(folder_name(directory)), Path(os.path.realpath(directory))
    cache.commit()
    _check_savable(cache)
    _check_target(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        _write(cache, scratch, include_artifact)
        # mkdtemp makes private folders, safetensors private files; a saved cache is to be shared like any other.
        mask = os.umask(0)
        os.umask(mask)
        for path in (scratch, *scratch.rglob("*")):
            os.chmod(path, (0o777 if path.is_dir() else 0o666) & ~mask)
        _put_in_place(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return given


def _check_savable(cache) -> None:
    lengths = {layer.held for layer in cache.oscar_layers}
    if not lengths:
        raise CacheStateError("this cache has no packed layer, so it cannot be saved: use pickle")
    if lengths == {0}:
        raise CacheStateError("an empty cache cannot be saved: feed it a prompt first")
    if len(lengths) > 1:
        raise CacheStateError(
            f"the layers hold {min(lengths)} to {max(lengths)} tokens: an earlier forward did not finish, so the cache cannot be "
            "saved; call cache.reset() and feed it again"
        )


def _check_target(directory: Path) -> None:
    """Only a saved cache may be overwritten: the folder is replaced as a whole, so it must hold nothing else."""
    if directory.exists() and not directory.is_dir():
        raise OscarError(f"{directory} is a file: give a folder to save the cache in")
    if Path.cwd().is_relative_to(directory):
        raise OscarError(
            f"{directory} is or holds the working directory, which cannot be replaced: give another folder"
        )
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    others = sorted(
        name for name in names if name not in (CACHE_FILE, ARTIFACT_FOLDER) and not _LAYER_FILE.fullmatch(name)
    )
    if others or (names and CACHE_FILE not in names):
        raise OscarError(
            f"{directory} holds other files than a saved cache ({', '.join(others or names)[:200]}), which saving would remove: "
            "give a new or an empty folder"
        )


def _put_in_place(scratch: Path, directory: Path) -> None:
    if directory.is_dir():
        old = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.old."))
        try:
            os.replace(directory, old / "replaced")
            try:
                os.replace(scratch, directory)
            except OSError:
                os.replace(old / "replaced", directory)
                raise
        finally:
            shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(scratch, directory)


def _write(cache, folder: Path, include_artifact: bool) -> None:
    layers = []
    for index, layer in enumerate(tqdm(cache.layers, desc="saving the cache", unit="layer", disable=None)):
        record, tensors = _packed_layer(layer) if isinstance(layer, OscarLayer) else saved_native.state(index, layer)
        path = folder / _layer_file(index)
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"}
        )
        layers.append({**record, "bytes": path.stat().st_size, "sha256": _file_hash(path)})
        del tensors
    if include_artifact:
        cache.artifact.save(folder / ARTIFACT_FOLDER)
    content = {
        "format_version": FORMAT_VERSION,
        "model": cache.model_fields,
        "storage": {name: getattr(cache.oscar_config, name) for name in OVERRIDABLE},
        "artifact": {"source": cache.artifact.source, "sha256": artifact_hash(cache.artifact)},
        "layers": layers,
    }
    (folder / CACHE_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _packed_layer(layer: OscarLayer) -> tuple[dict, dict[str, Tensor]]:
    """What of an OscarLayer is in use: its record for the JSON and its tensors."""
    tokens, history, sink = layer.tokens, layer.history, layer.sink
    record = {
        "kind": "oscar",
        "tokens": tokens,
        "history": history,
        "starts": layer.starts,
        "starts_known": layer.starts_known,
        "batch_size": layer.batch_size,
        "kv_heads": layer.kv_heads,
        "key_dim": layer.sink_keys.shape[3],
        "value_dim": layer.sink_values.shape[3],
        "dtype": str(layer.dtype).removeprefix("torch."),
    }
    ring = layer.ring_index(sink + history, tokens)
    in_ring = max(0, tokens - sink - history)
    tensors = {}
    for name, rows, windows in (
        ("key", layer.key_rows, (layer.sink_keys, layer.ring_keys)),
        ("value", layer.value_rows, (layer.sink_values, layer.ring_values)),
    ):
        tensors[f"{name}_codes"] = _codes_in_use(rows, history)
        tensors[f"{name}_scale"] = rows.scale[:, :, :history]
        if rows.min is not None:
            tensors[f"{name}_min"] = rows.min[:, :, :history]
        tensors[f"sink_{name}s"] = _sink_in_use(layer, windows[0])
        tensors[f"recent_{name}s"] = windows[1][:, :, ring] if in_ring else windows[1][:, :, :0]
    return record, tensors


def _codes_in_use(rows: PackedRows, history: int) -> Tensor:
    per_row = tokens_per_row(rows.head_dim)
    codes = rows.codes[:, :, : -(-history // per_row)]
    if history % per_row:
        # The second token of the last row was taken back or never there.
        codes = codes.clone()
        codes[:, :, -1].view(torch.uint8).unflatten(-1, (-1, 2))[..., 1] = 0
    return codes


def _sink_in_use(layer: OscarLayer, buffer: Tensor) -> Tensor:
    """The sink buffer with zeros where an entry was taken back, unpadded only as far as it is used."""
    packed_end = min(layer.tokens, layer.sink + layer.history)
    if layer.starts is None:
        return buffer[:, :, : min(layer.sink, packed_end)]
    # Not the layer's own copy of its starts: an offloaded buffer is elsewhere.
    entries = torch.arange(layer.sink, device=buffer.device) + torch.tensor(layer.starts, device=buffer.device)[:, None]
    return buffer * (entries < packed_end)[:, None, :, None]


# ---------------------------------------------------------------------------------------------------------- load
def _device(name) -> torch.device:
    try:
        device = torch.device("cpu" if name is None else name)
    except (RuntimeError, TypeError) as error:
        raise OscarError(f"device is {name!r}, allowed are names such as 'cpu', 'cuda', 'cuda:1': {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OscarError(f"device is {name!r}, but torch sees no CUDA GPU here: use device='cpu'")
    try:
        usable = device.type != "meta" and torch.empty(1, device=device).cpu().numel()
    except (RuntimeError, AssertionError, NotImplementedError):
        usable = False
    if not usable or (device.type == "cpu" and device.index):
        raise OscarError(
            f"device is {name!r}, on which nothing can be stored here: use 'cpu', or a GPU that torch sees"
        )
    return device


def folder_name(given) -> str | os.PathLike:
    """A folder as it was given; OscarError for anything that is not the name of one."""
    if not isinstance(given, (str, os.PathLike)) or not str(given).strip():
        raise OscarError(f"a saved cache is a folder: give its name, got {given!r}")
    return given


def _check_same_model(directory: Path, config, index: int, record: dict) -> None:
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


def load(cls, directory, config=None, artifact=None, device=None, max_cache_len=None, offloading=False):
    """A cache from a folder that `save` wrote. See `OscarCache.load`."""
    directory = Path(folder_name(directory))
    content = _read_json(directory)
    artifact = _artifact(directory, content, artifact)
    given = None if config is None else compat.text_config(config)
    if config is None:
        config = _recorded_config(directory, content["model"])
    cache = cls(config, artifact=artifact, max_cache_len=max_cache_len, offloading=offloading, **content["storage"])
    records = content["layers"]
    if len(records) != len(cache.layers):
        raise CacheStateError(
            f"{directory} holds {len(records)} layers, this model has {len(cache.layers)}: it was saved with another model"
        )
    if given is None:
        cache.record_model(content["model"])
    device = _device(device)
    batch = next((record.get("batch_size") for record in records if record.get("kind") == "oscar"), None)
    for index, layer in enumerate(tqdm(cache.layers, desc="loading the cache", unit="layer", disable=None)):
        record, path = records[index], directory / _layer_file(index)
        ours = isinstance(layer, OscarLayer)
        if (record.get("kind") == "oscar") != ours:
            raise CacheStateError(
                f"{directory}, layer {index}: {'a packed' if not ours else 'another'} layer was saved, this model has a "
                f"{type(layer).__name__} there: it was saved with another model"
            )
        _check_file(path, record)
        if ours:
            if given is not None:
                _check_same_model(directory, given, index, record)
            _restore(path, index, layer, record, device)
        else:
            found = saved_native.expected(path, record)
            if any(len(shape) < 2 or shape[0] != batch for _, shape in found.values()):
                raise CacheStateError(f"{path} holds {found}, the packed layers {batch!r} rows: save the cache again")
            saved_native.restore(index, layer, record, _tensors(path, found, device))
        if offloading and ours:
            layer.offload()
    _check_lengths(directory, cache)
    return cache


def _read_json(directory: Path) -> dict:
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
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise CacheStateError(
            f"{path} has format_version {version!r}, this oscar_hf reads {FORMAT_VERSION}: update oscar_hf or save again"
        )
    model, layers = content.get("model"), content.get("layers")
    sound = (
        isinstance(model, dict)
        and _is_list(model.get("layer_types"), str)
        and isinstance(model.get("cache_fields"), dict)
        and isinstance(content.get("storage"), dict)
        and set(content["storage"]) == set(OVERRIDABLE)
        and isinstance(content.get("artifact"), dict)
        and _is_list([content["artifact"].get(name) for name in ("source", "sha256")], str)
        and _is_list(layers, dict)
        and 0 < len(layers) <= MAX_LAYERS
    )
    if not sound:
        raise CacheStateError(f"{path} lacks fields of a saved cache or has them of wrong types: save the cache again")
    return content


def _recorded_config(directory: Path, model: dict):
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


def _artifact(directory: Path, content: dict, artifact) -> Artifact:
    source, expected = content["artifact"]["source"], content["artifact"]["sha256"]
    if artifact is None:
        folder = directory / ARTIFACT_FOLDER
        if not folder.is_dir():
            raise ArtifactError(f"{directory} was saved without its artifact ({source}): pass artifact=...")
        artifact = Artifact.load(folder)
        artifact.source = source
    elif not isinstance(artifact, Artifact):
        artifact = Artifact.load(artifact)
    if artifact_hash(artifact) != expected:
        raise ArtifactError(
            f"{directory} was saved with another artifact ({source}) than {artifact.source}: its codes mean nothing to this one"
        )
    return artifact


def _check_file(path: Path, record: dict) -> None:
    if not path.is_file():
        raise CacheStateError(f"{path} is missing: copy the whole folder, or save the cache again")
    if path.stat().st_size != record.get("bytes"):
        raise CacheStateError(
            f"{path} has {path.stat().st_size} bytes, {CACHE_FILE} says {record.get('bytes')}: copy it again"
        )
    if _file_hash(path) != record.get("sha256"):
        raise CacheStateError(f"{path} is not the file that was saved (its SHA-256 differs): copy it again")


def _tensors(path: Path, expected: dict[str, tuple[str, tuple[int, ...]]], device: torch.device) -> dict[str, Tensor]:
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


def _check_record(where: str, layer: OscarLayer, record: dict) -> None:
    """Every number of a layer's record, before anything is allocated from it."""
    for name, least in (
        ("tokens", 1),
        ("history", 0),
        ("batch_size", 1),
        ("kv_heads", 1),
        ("key_dim", 8),
        ("value_dim", 8),
    ):
        value = record.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_COUNT:
            raise CacheStateError(
                f"{where}: {name} is {value!r}, allowed are integers from {least} on: save the cache again"
            )
    if not isinstance(record.get("dtype"), str) or record["dtype"] not in DTYPES:
        raise CacheStateError(f"{where}: dtype is {record.get('dtype')!r}, allowed are {', '.join(DTYPES)}")
    tokens, history, starts = record["tokens"], record["history"], record.get("starts")
    recent = max(0, tokens - layer.sink) - history
    if not 0 <= recent <= layer.ring_size:
        raise CacheStateError(
            f"{where}: {tokens} tokens of which {history} are packed do not fit windows of {layer.sink} and {layer.ring_size} "
            "tokens: save the cache again"
        )
    sound = starts is None or (_is_list(starts, int) and len(starts) == record["batch_size"] and any(starts))
    if (
        not sound
        or any(not 0 <= start < _MAX_COUNT for start in starts or ())
        or record.get("starts_known") not in (True, False)
    ):
        raise CacheStateError(f"{where}: starts {starts!r} are not one slot per row of the batch: save the cache again")
    if isinstance(layer, StaticOscarLayer) and tokens > layer.max_cache_len:
        raise CacheStateError(
            f"{where} holds {tokens} tokens, max_cache_len is {layer.max_cache_len}: use a larger one"
        )
    size = getattr(torch, record["dtype"]).itemsize * (record["key_dim"] + record["value_dim"])
    if record["batch_size"] * record["kv_heads"] * (layer.sink + layer.ring_size) * size > _MAX_WINDOW_BYTES:
        raise CacheStateError(
            f"{where}: the windows would take more than {_MAX_WINDOW_BYTES >> 30} GiB: save the cache again"
        )


def _expected(layer: OscarLayer, record: dict) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor of a packed layer."""
    config, tokens, history = layer.config, record["tokens"], record["history"]
    rows = (record["batch_size"], record["kv_heads"])
    dtype = DTYPES[record["dtype"]]
    sink = min(layer.sink, tokens) if record["starts"] is None else layer.sink
    recent = max(0, tokens - layer.sink) - history
    expected = {}
    for name, dim, symmetric in (
        ("key", record["key_dim"], config.key_symmetric), ("value", record["value_dim"], config.value_symmetric),
    ):  # fmt: skip
        per_row = tokens_per_row(dim)
        qparams = ("F16", (*rows, history, dim // config.group_size_for(dim)))
        expected[f"{name}_codes"] = ("I16", (*rows, -(-history // per_row), dim // 8 * per_row))
        expected[f"{name}_scale"] = qparams
        if not symmetric:
            expected[f"{name}_min"] = qparams
        expected[f"sink_{name}s"] = (dtype, (*rows, sink, dim))
        expected[f"recent_{name}s"] = (dtype, (*rows, recent, dim))
    return expected


def _restore(path: Path, index: int, layer: OscarLayer, record: dict, device: torch.device) -> None:
    where = f"{path.parent}, layer {index}"
    _check_record(where, layer, record)
    tensors = _tensors(path, _expected(layer, record), device)
    for name, tensor in tensors.items():
        if name.endswith(("_scale", "_min")) and not torch.isfinite(tensor).all():
            raise CacheStateError(f"{path}: {name} holds NaN or infinite values: save the cache again")
        if name.endswith("_scale") and not (tensor > 0).all():
            raise CacheStateError(f"{path}: {name} holds values that are not positive: save the cache again")
    shape, dtype = (record["batch_size"], record["kv_heads"], 0), getattr(torch, record["dtype"])
    layer.lazy_initialization(
        *(torch.empty(*shape, record[name], dtype=dtype, device=device) for name in ("key_dim", "value_dim"))
    )
    tokens, history = record["tokens"], record["history"]
    begin = layer.sink + history
    recent = layer.ring_index(begin, tokens) if begin < tokens else slice(0, 0)
    for name, rows, sink, ring in (
        ("key", layer.key_rows, layer.sink_keys, layer.ring_keys),
        ("value", layer.value_rows, layer.sink_values, layer.ring_values),
    ):
        rows.reserve(history)
        codes = tensors[f"{name}_codes"]
        rows.codes[:, :, : codes.shape[2]] = codes
        rows.scale[:, :, :history] = tensors[f"{name}_scale"]
        if rows.min is not None:
            rows.min[:, :, :history] = tensors[f"{name}_min"]
        exact = tensors[f"sink_{name}s"]
        sink[:, :, : exact.shape[2]] = exact
        ring[:, :, recent] = tensors[f"recent_{name}s"]
    layer.adopt(tokens, history, record["starts"], record["starts_known"])


def _check_lengths(directory: Path, cache) -> None:
    attending = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    lengths = {int(layer.get_seq_length()) for layer in attending}
    batches = {layer.batch_size for layer in cache.oscar_layers}
    if len(lengths) > 1 or len(batches) > 1:
        raise CacheStateError(
            f"{directory}: the layers hold {sorted(lengths)} tokens of {sorted(batches)} rows: save the cache again"
        )
