"""Saved caches: an OscarCache in a folder, to be loaded again and continued.

A folder holds `oscar_cache.json` (geometry, lengths, starts, storage config, the identity of the artifact, size and SHA-256 of
every file), one `layer-NNNNN.safetensors` per layer with the tokens in use and no slack, and, unless it was left out, the
artifact in `artifact/` (docs/format.md describes every field). The same folder serves growing and static caches. Writing and
reading go layer by layer, so that one layer at most is in memory twice. Everything is checked before it is used, see
`save_checks`.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path, PurePath

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from .. import saving
from ..artifact import version_1
from ..artifact.artifact import CONFIG_FILE, TENSOR_FILE, Artifact
from ..artifact.recipes import OVERRIDABLE
from ..errors import ArtifactError, CacheStateError, OscarError
from ..storage.layer_store import LayerStore
from ..transformers_compat import model_config as compat
from . import save_checks, save_load_native
from .layer import OscarLayer
from .save_checks import ARTIFACT_FOLDER, CACHE_FILE, FORMAT_VERSION, LEARNED, QUERY_MOMENT


# ---------------------------------------------------------------------------------------------------------- identity
def artifact_hash(artifact: Artifact, version: int = FORMAT_VERSION) -> str:
    """SHA-256 of what an artifact computes with: its config without provenance, and its constants. version: the format of the
    saved cache, for version 1 knew other fields."""
    fields = dataclasses.asdict(artifact.config)
    if version == 1:
        fields = version_1.former_fields(artifact.config, artifact.written_fields)
    for name in ("calibration", "base_model", "base_model_revision"):
        fields.pop(name, None)
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for layer, constants in sorted(artifact.layers.items()):
        for name, tensor in sorted(constants.tensors().items()):
            digest.update(f"{layer}.{name}{list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy())
    return digest.hexdigest()


def _layer_file(index: int) -> str:
    return f"layer-{index:05d}.safetensors"


def folder_name(given) -> str | os.PathLike:
    """A folder as it was given; OscarError for anything that is not the name of one."""
    if not isinstance(given, (str, os.PathLike)) or not str(given).strip():
        raise OscarError(f"a saved cache is a folder: give its name, got {given!r}")
    return given


# ---------------------------------------------------------------------------------------------------------- save
def save(cache, directory: str | os.PathLike, include_artifact: bool = True) -> Path:
    """Write a cache to a folder; an interruption leaves what was there before. See `OscarCache.save_pretrained`."""
    given, directory = Path(folder_name(directory)), Path(os.path.realpath(directory))
    cache.commit()
    _check_savable(cache)
    _check_target(directory, include_artifact)
    with saving.replaced_folder(directory, "a cache") as scratch:
        _write(cache, scratch, include_artifact)
    return given


def _check_savable(cache) -> None:
    lengths = {layer.store.held for layer in cache.oscar_layers}
    if not lengths:
        raise CacheStateError("this cache has no packed layer, so it cannot be saved: use pickle")
    if lengths == {0}:
        raise CacheStateError("an empty cache cannot be saved: feed it a prompt first")
    if len(lengths) > 1:
        raise CacheStateError(
            f"the layers hold {min(lengths)} to {max(lengths)} tokens: an earlier forward did not finish, so the cache cannot be "
            "saved; call cache.reset() and feed it again"
        )


def _check_target(directory: Path, include_artifact: bool) -> None:
    """Only a saved cache may be overwritten: the folder is replaced as a whole, so it must hold nothing else."""
    if Path.cwd().is_relative_to(directory):
        raise OscarError(
            f"{directory} is or holds the working directory, which cannot be replaced: give another folder"
        )

    def is_own(path: PurePath) -> bool:
        if path.parent.name == ARTIFACT_FOLDER and len(path.parts) == 2:
            # One that was saved there by itself would be lost.
            return include_artifact and path.name in (CONFIG_FILE, TENSOR_FILE)
        return len(path.parts) == 1 and (path.name == CACHE_FILE or bool(save_checks.LAYER_FILE.fullmatch(path.name)))

    saving.check_own(directory, is_own, "a saved cache")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / CACHE_FILE).is_file():
        raise OscarError(
            f"{directory} holds no saved cache, but other files, which saving would remove: give a new or an empty folder"
        )


def _write(cache, folder: Path, include_artifact: bool) -> None:
    layers = []
    for index, layer in enumerate(tqdm(cache.layers, desc="saving the cache", unit="layer", disable=None)):
        if isinstance(layer, OscarLayer):
            record, tensors = _packed_layer(layer.store)
        else:
            record, tensors = save_load_native.state(index, layer)
        path = folder / _layer_file(index)
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"}
        )
        layers.append({**record, "bytes": path.stat().st_size, "sha256": save_checks.file_hash(path)})
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


def _packed_layer(store: LayerStore) -> tuple[dict, dict[str, Tensor]]:
    """What of a store is in use: its record for the JSON and its tensors."""
    (tokens, history), sink = store.lengths(), store.sink
    batch, heads, key_dim, value_dim = store.geometry
    learned = store.learned()
    # What a growing cache may still have to learn from.
    moment = None if learned is None or history else store.statistics.query_moment
    record = {
        "kind": "oscar",
        "tokens": tokens,
        "history": history,
        "starts": store.padding.rows or None,
        "starts_known": store.padding.is_settled,
        "batch_size": batch,
        "kv_heads": heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "dtype": str(store.dtype).removeprefix("torch."),
        # Constants that the store made from this sequence, and how many queries a moment of queries is of, 0 for none.
        "learned": learned is not None,
        "queries": 0 if moment is None else store.statistics.queries,
    }
    recent = store.ring_index(sink + history, tokens) if sink + history < tokens else slice(0, 0)
    tensors = {}
    for name, side in zip(("key", "value"), store.sides):
        tensors |= {f"{name}_{part}": tensor for part, tensor in side.rows.in_use(history).items()}
        tensors[f"sink_{name}s"] = _sink_in_use(store, side.sink)
        tensors[f"recent_{name}s"] = side.ring[:, :, recent]
    if learned is not None:
        tensors |= {name: made for name in LEARNED if (made := getattr(learned, name)) is not None}
    if moment is not None:
        tensors[QUERY_MOMENT] = moment
    return record, tensors


def _sink_in_use(store: LayerStore, buffer: Tensor) -> Tensor:
    """The sink buffer with zeros where an entry was taken back, unpadded only as far as it is used."""
    packed_end = min(store.tokens, store.sink + store.history)
    if not store.padding.is_padded:
        return buffer[:, :, : min(store.sink, packed_end)]
    # Not the padding's own tensor: an offloaded buffer is elsewhere.
    starts = torch.tensor(store.padding.rows, device=buffer.device)
    entries = torch.arange(store.sink, device=buffer.device) + starts[:, None]
    return buffer * (entries < packed_end)[:, None, :, None]


# ---------------------------------------------------------------------------------------------------------- load
def load(cls, directory, config=None, artifact=None, device=None, max_cache_len=None, offloading=False):
    """A cache of class `cls` from a folder that `save` wrote. See `OscarCache.load`."""
    directory = Path(folder_name(directory))
    content = save_checks.read_json(directory)
    artifact = _artifact(directory, content, artifact)
    given = None if config is None else compat.text_config(config)
    if config is None:
        config = save_checks.recorded_config(directory, content["model"])
    storage = content["storage"]
    if content["format_version"] == 1:
        storage = storage | {"key_center": version_1.key_center(artifact.config, artifact.written_fields)}
    cache = cls(config, artifact=artifact, max_cache_len=max_cache_len, offloading=offloading, **storage)
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
        save_checks.check_file(path, record)
        if ours:
            if given is not None:
                save_checks.check_same_model(directory, given, index, record)
            _restore(path, index, layer, record, device)
        else:
            found = save_load_native.expected(path, record)
            if any(len(shape) < 2 or shape[0] != batch for _, shape in found.values()):
                raise CacheStateError(f"{path} holds {found}, the packed layers {batch!r} rows: save the cache again")
            save_load_native.restore(index, layer, record, save_checks.read_tensors(path, found, device))
        if offloading and ours:
            layer.offload()
    save_checks.check_lengths(directory, cache)
    return cache


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


def _artifact(directory: Path, content: dict, artifact) -> Artifact:
    source, expected = content["artifact"]["source"], content["artifact"]["sha256"]
    if artifact is None:
        folder = directory / ARTIFACT_FOLDER
        if not folder.is_dir():
            raise ArtifactError(f"{directory} was saved without its artifact ({source}): pass artifact=...")
        artifact = Artifact.load(folder).with_provenance(source=source)
    elif not isinstance(artifact, Artifact):
        artifact = Artifact.load(artifact)
    if artifact_hash(artifact, content["format_version"]) != expected:
        raise ArtifactError(
            f"{directory} was saved with another artifact ({source}) than {artifact.source}: its codes mean nothing to this one"
        )
    return artifact


def _restore(path: Path, index: int, layer: OscarLayer, record: dict, device: torch.device) -> None:
    where, store = f"{path.parent}, layer {index}", layer.store
    save_checks.check_record(where, layer, record)
    tensors = save_checks.read_tensors(path, save_checks.expected_tensors(layer, record), device)
    save_checks.check_values(path, tensors)
    shape, dtype = (record["batch_size"], record["kv_heads"], 0), save_checks.record_dtype(where, record)
    layer.lazy_initialization(
        *(torch.empty(*shape, record[name], dtype=dtype, device=device) for name in ("key_dim", "value_dim"))
    )
    tokens, history = record["tokens"], record["history"]
    begin = store.sink + history
    recent = store.ring_index(begin, tokens) if begin < tokens else slice(0, 0)
    for name, side in zip(("key", "value"), store.sides):
        side.rows.fill({part: tensors[f"{name}_{part}"] for part in side.rows.named}, history)
        exact = tensors[f"sink_{name}s"]
        side.sink[:, :, : exact.shape[2]] = exact
        side.ring[:, :, recent] = tensors[f"recent_{name}s"]
    save_checks.check_learned(path, tensors, must_learn=store.statistics is not None)
    if store.statistics is not None:
        learned = {name: tensors[name] for name in LEARNED if name in tensors}
        store.restore_learned(learned, tensors.get(QUERY_MOMENT), record.get("queries", 0))
    store.restore(tokens, history, record["starts"], record["starts_known"])
