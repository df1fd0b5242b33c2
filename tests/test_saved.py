"""Saved caches: the same logits after loading, whatever was saved; every corruption refused in its own words."""

import copy
import json
import shutil

import pytest
import torch
from helpers import calibrated_artifact
from safetensors.torch import load_file, save_file
from test_cache import WINDOWS, new_cache, one_layer, states
from test_operations import forward
from tiny_models import EAGER_ONLY, prompt, tiny_config, tiny_model

from oscar_hf import Artifact, ArtifactError, CacheStateError, OscarCache, OscarError, StaticOscarCache
from oscar_hf.artifact.recipes import PUBLISHED_STORAGE
from oscar_hf.cache.save_checks import CACHE_FILE, LEARNED, file_hash
from oscar_hf.cache.save_load_native import state

SMALL = WINDOWS
# Storage with a minimum for each scale, and nothing learned.
RANGES = dict(WINDOWS, recipe="hadamard", **PUBLISHED_STORAGE)


def filled(family="llama", tokens=60, pads=(), rows=2, **options):
    """A model, its cache after a prompt and a few steps, and ids to go on with."""
    model = tiny_model(family, "eager" if family in EAGER_ONLY else "sdpa")
    ids, mask = prompt(rows, tokens, pads)
    cache = OscarCache(model.config, **(SMALL | options))
    forward(model, cache, ids, mask if pads else None)
    for step in range(3):
        mask = torch.cat([mask, torch.ones(rows, 1, dtype=mask.dtype)], 1)
        forward(model, cache, prompt(rows, 1, seed=9 + step)[0], mask if pads else None)
    return model, cache, mask if pads else None


def go_on(model, cache, mask, steps=12):
    """Logits of further steps, enough to pack what was in the windows."""
    logits = []
    for step in range(steps):
        ids = prompt(cache.batch_size, 1, seed=step)[0]
        if mask is not None:
            mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=mask.dtype)], 1)
        logits.append(forward(model, cache, ids, mask))
    return torch.cat(logits, 1)


@pytest.mark.parametrize("pads", [(), (0, 7)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("recipe", ["default", "hadamard", "ranges"])
def test_a_loaded_cache_goes_on_bit_for_bit(recipe, family, pads, tmp_path):
    if family != "llama" and (recipe != "default" or (family == "gpt_oss" and pads)):
        pytest.skip("one model with every recipe, and one of each kind with the default one, are enough")
    storage = RANGES if recipe == "ranges" else dict(recipe=recipe)
    for options in ({}, {"max_cache_len": 128}):
        model, cache, mask = filled(family, pads=pads, **storage, **options)
        assert cache.save_pretrained(tmp_path / "cache") == tmp_path / "cache"
        loaded = OscarCache.load(tmp_path / "cache", config=model.config, **options)
        assert type(loaded) is type(cache) and int(loaded.get_seq_length()) == 63
        assert torch.equal(go_on(model, loaded, mask), go_on(model, cache, mask))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("static", [False, True])
def test_one_folder_serves_growing_and_static_caches(family, static, tmp_path):
    model, cache, _ = filled(family, **({"max_cache_len": 128} if static else {}))
    cache.save_pretrained(tmp_path / "cache")
    other = OscarCache.load(tmp_path / "cache", max_cache_len=None if static else 100)
    assert isinstance(other, StaticOscarCache) != static
    torch.testing.assert_close(go_on(model, other, None), go_on(model, cache, None), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("tokens", [1, 3, 20, 22, 24, 26])
def test_sliding_windows_of_any_filling(tokens, tmp_path):
    """The window of 24 is not full, just full, or over; tokens + 3 are held. Nothing is learned: from a few tokens a growing cache
    learns later than a static one."""
    for save, load in ((None, 100), (100, None), (100, 64)):
        room = {"max_cache_len": save} if save else {}
        model, cache, _ = filled("gemma3", tokens, recipe="hadamard", key_scale="search", **room)
        cache.save_pretrained(tmp_path / "cache")
        loaded = OscarCache.load(tmp_path / "cache", max_cache_len=load)
        torch.testing.assert_close(go_on(model, loaded, None), go_on(model, cache, None), atol=1e-4, rtol=1e-3)


def test_a_static_cache_shorter_than_the_sliding_window(tmp_path):
    model, cache, _ = filled("gemma3", 10)
    cache.save_pretrained(tmp_path / "cache")
    loaded = OscarCache.load(tmp_path / "cache", max_cache_len=20)
    torch.testing.assert_close(go_on(model, loaded, None, 7), go_on(model, cache, None, 7), atol=1e-4, rtol=1e-3)


def test_a_prompt_cache_serves_many_continuations(tmp_path):
    model, cache, _ = filled(rows=1)
    cache.save_pretrained(tmp_path / "cache")
    loaded = OscarCache.load(tmp_path / "cache")
    for seed in range(3):
        ids = torch.cat([prompt(1, 63)[0], prompt(1, 5, seed=seed)[0]], 1)
        fresh, again = copy.deepcopy(cache), copy.deepcopy(loaded)
        expected = model.generate(ids, past_key_values=fresh, max_new_tokens=8, do_sample=False)
        assert torch.equal(model.generate(ids, past_key_values=again, max_new_tokens=8, do_sample=False), expected)
    assert loaded.get_seq_length() == 63


def test_compiled_decoding_of_a_loaded_cache(tmp_path):
    from test_static import Counting, generate

    model, cache, _ = filled()
    cache.save_pretrained(tmp_path / "cache")
    ids = torch.cat([prompt(2, 63)[0], prompt(2, 4, seed=5)[0]], 1)
    counting = Counting("eager")
    loaded = OscarCache.load(tmp_path / "cache", max_cache_len=128)
    got = generate(model, ids, torch.ones_like(ids), loaded, **counting.options)
    assert torch.equal(got, generate(model, ids, torch.ones_like(ids), cache))


def test_beams_of_a_loaded_cache_and_operations_on_it(tmp_path):
    model, cache, mask = filled(pads=(0, 7))
    cache.save_pretrained(tmp_path / "cache")
    loaded = OscarCache.load(tmp_path / "cache")
    for each in (cache, loaded):
        each.crop(-30)
        each.reorder_cache(torch.tensor([1, 1]))
    mask = mask[[1, 1], :-30]
    assert torch.equal(go_on(model, loaded, mask), go_on(model, cache, mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (64, 16)])
@pytest.mark.parametrize(
    "storage",
    [
        {},
        dict(value_scale="percentile(0.92)", value_symmetric=False),
        dict(key_scale="search", key_symmetric=False, key_center="mean", group_size=8),
        dict(key_scale="weighted_search", key_center="none"),
    ],
)
def test_every_layout_of_storage(storage, dims, dtype, tmp_path):
    config = tiny_config("llama", num_hidden_layers=1)
    artifact = calibrated_artifact(layers=1, dim=dims[0], value_dim=dims[1])
    config.head_dim = dims[0]
    cache = OscarCache(config, artifact=artifact, **storage, **WINDOWS)
    (keys, _), (_, values) = states(91, dim=dims[0], dtype=dtype), states(91, dim=dims[1], dtype=dtype)
    cache.update(keys, values, 0)
    cache.crop(-2)
    cache.save_pretrained(tmp_path / "cache")
    loaded = OscarCache.load(tmp_path / "cache")
    layer, other = cache.layers[0], loaded.layers[0]
    assert other.store.history == layer.store.history > 0 and other.dtype == dtype
    for kind in "kv":
        assert torch.equal(other.store.dense(kind), layer.store.dense(kind))


def test_only_tokens_in_use_are_written(tmp_path):
    """No slack, and nothing of tokens that were taken back."""
    cache = new_cache()
    keys, values = states(400, batch=1)
    for index in range(3):
        cache.update(keys, values, index)
    cache.crop(-350)
    cache.save_pretrained(tmp_path / "cache")
    (record, *_) = json.loads((tmp_path / "cache" / CACHE_FILE).read_text())["layers"]
    tensors = load_file(tmp_path / "cache" / "layer-00000.safetensors")
    assert (record["tokens"], record["history"]) == (50, 46)
    assert tensors["key_codes"].shape[2] == tensors["key_scale"].shape[2] == 46
    assert tensors["key_centers"].shape[2] == 2 and "value_centers" not in tensors
    assert tensors["sink_keys"].shape[2] == 4 and tensors["recent_keys"].shape[2] == 0
    assert cache.layers[0].store.keys.rows.capacity > 300


def test_odd_tokens_and_stale_sinks_leave_no_trace(tmp_path):
    cache = OscarCache(tiny_config("llama", num_hidden_layers=1, head_dim=64), **SMALL)
    cache.set_padding(torch.tensor([[1] * 20, [0] * 12 + [1] * 8]))
    cache.update(*states(90, dim=64), 0)
    cache.crop(-75)
    assert cache.layers[0].store.history % 2
    cache.save_pretrained(tmp_path / "cache")
    tensors = load_file(tmp_path / "cache" / "layer-00000.safetensors")
    last = tensors["key_codes"][:, :, -1].view(torch.uint8).unflatten(-1, (-1, 2))
    assert (last[..., 1] == 0).all() and (last[..., 0] != 0).any()
    # Row 1 begins at slot 12; slots 12 to 14 are left of its sink of four.
    assert (tensors["sink_keys"][1, :, 3] == 0).all() and (tensors["sink_keys"][1, :, :3] != 0).any()


def test_an_artifact_can_stay_outside(tmp_path):
    # From a folder: there, an inverse that is a transpose is one in memory, too, so that products have the same last bit.
    artifact = Artifact.load(calibrated_artifact().save(tmp_path / "artifact"))
    config = tiny_config("llama")
    model = tiny_model("llama")
    cache = OscarCache(config, artifact=artifact, **WINDOWS)
    forward(model, cache, prompt(1, 60)[0])
    cache.save_pretrained(tmp_path / "cache", include_artifact=False)
    with pytest.raises(ArtifactError, match="saved without its artifact"):
        OscarCache.load(tmp_path / "cache")
    with pytest.raises(ArtifactError, match="saved with another artifact"):
        OscarCache.load(tmp_path / "cache", artifact=calibrated_artifact(seed=1))
    loaded = OscarCache.load(tmp_path / "cache", artifact=artifact)
    # Nothing is learned: the metric is the artifact's.
    assert loaded.layers[0].constants is cache.layers[0].constants
    again = OscarCache.load(tmp_path / "cache", artifact=tmp_path / "artifact")
    expected = go_on(model, cache, None)
    assert torch.equal(go_on(model, loaded, None), expected) and torch.equal(go_on(model, again, None), expected)
    # With the artifact inside, the folder is complete.
    cache.save_pretrained(tmp_path / "cache")
    complete = OscarCache.load(tmp_path / "cache")
    assert torch.equal(go_on(model, complete, None), go_on(model, cache, None))


def test_saving_again_replaces_the_old_cache_only(tmp_path):
    model, cache, _ = filled()
    cache.save_pretrained(tmp_path / "cache")
    forward(model, cache, prompt(2, 5)[0])
    cache.save_pretrained(tmp_path / "cache")
    assert OscarCache.load(tmp_path / "cache").get_seq_length() == 68
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(OscarError, match="holds other files"):
        cache.save_pretrained(tmp_path / "mine")
    with pytest.raises(OscarError, match="is a file"):
        cache.save_pretrained(tmp_path / "mine" / "notes.txt")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"


def test_what_else_lies_in_the_folder_is_never_removed(tmp_path, monkeypatch):
    _, cache, _ = filled()
    folder = cache.save_pretrained(tmp_path / "cache")
    (folder / "notes.txt").write_text("keep me")
    with pytest.raises(OscarError, match=r"other files than a saved cache \(notes.txt\), which saving would remove"):
        cache.save_pretrained(folder)
    (folder / "notes.txt").unlink()
    (tmp_path / "link").symlink_to(folder)
    cache.save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and OscarCache.load(folder).get_seq_length() == 63
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name, said in ((".", "working directory"), ("", "give its name"), ("..", "working directory")):
        with pytest.raises(OscarError, match=said):
            cache.save_pretrained(name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "here", "link"]


@pytest.mark.parametrize("pads", [(), (0, 7)])
def test_an_offloaded_cache_is_saved_where_it_lies(pads, tmp_path):
    """Nothing is asked of the layer's own device: "meta" stands for a GPU here."""
    _, cache, _ = filled(tokens=83, pads=pads, offloading=True)
    layer = cache.layers[0]
    assert isinstance(layer.store.ring_index(layer.store.sink + layer.store.history, layer.store.tokens), torch.Tensor)
    expected = [tuple(layer.store.dense(kind) for kind in "kv") for layer in cache.layers]
    for layer in cache.layers:
        layer.device, layer._row_starts = torch.device("meta"), None
    loaded = OscarCache.load(cache.save_pretrained(tmp_path / "cache"))
    for layer, dense in zip(loaded.layers, expected):
        assert all(torch.equal(layer.store.dense(kind), each) for kind, each in zip("kv", dense))


def test_an_interrupted_save_leaves_the_old_cache(tmp_path, monkeypatch):
    model, cache, _ = filled()
    cache.save_pretrained(tmp_path / "cache")
    forward(model, cache, prompt(2, 5)[0])
    calls = []

    def fail(tensors, path, **options):
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        save_file(tensors, path, **options)

    monkeypatch.setattr("oscar_hf.cache.save_load.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        cache.save_pretrained(tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert OscarCache.load(tmp_path / "cache").get_seq_length() == 63


def test_what_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(CacheStateError, match="empty cache"):
        new_cache().save_pretrained(tmp_path / "cache")
    cache = new_cache()
    cache.update(*states(20), 0)
    with pytest.raises(CacheStateError, match="layer 1 holds 0 tokens where the layers before it held 20"):
        cache.save_pretrained(tmp_path / "cache")
    with pytest.raises(CacheStateError, match="layer 7 is a OscarLayer.*pickle"):
        state(7, one_layer())
    assert not (tmp_path / "cache").exists()


def test_a_smaller_static_cache_is_refused(tmp_path):
    _, cache, _ = filled()
    cache.save_pretrained(tmp_path / "cache")
    with pytest.raises(CacheStateError, match="holds 63 tokens, max_cache_len is 62"):
        OscarCache.load(tmp_path / "cache", max_cache_len=62)
    assert OscarCache.load(tmp_path / "cache", max_cache_len=63).get_seq_length() == 63


@pytest.mark.parametrize("name", [None, 3, " "])
def test_what_names_no_folder_is_refused(name):
    with pytest.raises(OscarError, match="a saved cache is a folder: give its name"):
        OscarCache.load(name)


def test_a_config_of_other_heads_is_refused(tmp_path):
    _, cache, _ = filled()
    folder = cache.save_pretrained(tmp_path / "cache")
    with pytest.raises(OscarError, match="it was saved with another model|was made for"):
        OscarCache.load(folder, config=tiny_config("qwen3", head_dim=32))


def test_another_model_is_refused(tmp_path):
    _, cache, _ = filled()
    cache.save_pretrained(tmp_path / "cache")
    with pytest.raises(CacheStateError, match="3 layers, this model has 4"):
        OscarCache.load(tmp_path / "cache", config=tiny_config("llama", num_hidden_layers=4))
    with pytest.raises(CacheStateError, match="layer 0: a packed layer was saved, this model has a DynamicSliding"):
        OscarCache.load(tmp_path / "cache", config=tiny_config("gemma3"))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Folders of a saved cache, of a padded one and of a hybrid's, to be copied and damaged."""
    root = tmp_path_factory.mktemp("saved")
    filled()[1].save_pretrained(root / "plain")
    filled(pads=(0, 7))[1].save_pretrained(root / "padded")
    filled("gemma3")[1].save_pretrained(root / "hybrid")
    filled("qwen3_next")[1].save_pretrained(root / "linear")
    filled(**RANGES)[1].save_pretrained(root / "ranges")
    # Everything is in the windows still.
    filled(tokens=5)[1].save_pretrained(root / "short")
    return root


def damage_json(folder, change):
    content = json.loads((folder / CACHE_FILE).read_text())
    change(content)
    (folder / CACHE_FILE).write_text(json.dumps(content))


def damage_tensors(folder, change, index=0):
    """Change the tensors of a layer and bring size and checksum up to date, as a forger would."""
    path = folder / f"layer-{index:05d}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    fresh = {"bytes": path.stat().st_size, "sha256": file_hash(path)}
    damage_json(folder, lambda content: content["layers"][index].update(fresh))


def truncate(folder):
    path = folder / "layer-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def flip(folder):
    path = folder / "layer-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(data)


def garbage(folder):
    path = folder / "layer-00000.safetensors"
    path.write_bytes(b"\xff" * 100)
    fresh = {"bytes": 100, "sha256": file_hash(path)}
    damage_json(folder, lambda content: content["layers"][0].update(fresh))


def first_layer(**fields):
    return lambda folder: damage_json(folder, lambda content: content["layers"][0].update(fields))


def whole(**fields):
    return lambda folder: damage_json(folder, lambda content: content.update(fields))


def cache_field(**fields):
    return lambda folder: damage_json(folder, lambda content: content["model"]["cache_fields"].update(fields))


def tensor(name, change, index=0):
    def function(tensors):
        tensors[name] = change(tensors[name])

    return lambda folder: damage_tensors(folder, function, index)


def nan(x):
    x = x.clone()
    x[0, 0, 0, 0] = float("nan")
    return x


def unlearned(folder):
    damage_tensors(folder, lambda tensors: [tensors.pop(name) for name in LEARNED])
    first_layer(learned=False)(folder)


def learned(folder):
    eye = torch.eye(16).repeat(2, 1, 1)
    damage_tensors(folder, lambda tensors: tensors.update(key_transform=eye, key_inverse=eye.clone()))
    first_layer(learned=True)(folder)


CORRUPTIONS = {
    "no json": ("plain", lambda folder: (folder / CACHE_FILE).unlink(), "holds no oscar_cache.json"),
    "not json": ("plain", lambda folder: (folder / CACHE_FILE).write_text("{"), "not valid JSON"),
    "not text": ("plain", lambda folder: (folder / CACHE_FILE).write_bytes(b"\xff\xfe\x00"), "not valid JSON"),
    "deep json": ("plain", lambda folder: (folder / CACHE_FILE).write_text("[" * 200_000), "not valid JSON"),
    "a list": ("plain", lambda folder: (folder / CACHE_FILE).write_text("[]"), "format_version None"),
    "version": ("plain", whole(format_version=3), "format_version 3, this oscar_hf reads 1 and 2"),
    "an older version": ("plain", whole(format_version=1), "lacks fields"),
    "version true": ("plain", whole(format_version=True), "format_version True"),
    "no layers": ("plain", whole(layers=[]), "lacks fields"),
    "layers of numbers": ("plain", whole(layers=[1, 2, 3]), "lacks fields"),
    "no storage": ("plain", whole(storage={}), "lacks fields"),
    "model": ("plain", whole(model={"layer_types": "full_attention", "cache_fields": {}}), "lacks fields"),
    "fewer layers": ("plain", lambda f: damage_json(f, lambda c: c["layers"].pop()), "2 layers, this model has 3"),
    "artifact": ("plain", whole(artifact={"source": "x", "sha256": "0"}), "saved with another artifact"),
    "missing file": ("plain", lambda folder: (folder / "layer-00002.safetensors").unlink(), "layer-00002.* is missing"),
    "short file": ("plain", truncate, "layer-00001.* bytes, oscar_cache.json says"),
    "flipped bit": ("plain", flip, "layer-00001.*SHA-256 differs"),
    "garbage": ("plain", garbage, "not a sound safetensors file"),
    "kind": ("plain", first_layer(kind="native"), "layer 0: another layer was saved"),
    "negative": ("plain", first_layer(history=-1), "history is -1"),
    "fraction": ("plain", first_layer(tokens=63.0), "tokens is 63.0"),
    "a bool": ("plain", first_layer(batch_size=True), "batch_size is True"),
    "huge": ("plain", first_layer(kv_heads=1 << 40), "kv_heads is 1099511627776"),
    "wide": ("plain", first_layer(kv_heads=1 << 28), "windows would take more than 16 GiB"),
    "dtype": ("plain", first_layer(dtype="int8"), "dtype is 'int8'"),
    "dtype of a list": ("plain", first_layer(dtype=[]), r"dtype is \[\]"),
    "window": ("hybrid", cache_field(sliding_window="abc"), "oscar_cache.json: cache_fields: sliding_window is 'abc'"),
    "window huge": ("hybrid", cache_field(sliding_window=10**30), "sliding_window is 10{30}, allowed is an integer"),
    "no window": ("hybrid", cache_field(sliding_window=None), "oscar_cache.json: .*sliding_window"),
    "modes": ("plain", cache_field(kv_sharing_modes=5), "kv_sharing_modes is 5, allowed is a list"),
    "states": ("linear", cache_field(number_of_conv_states=[]), r"number_of_conv_states is \[\]"),
    "layer types": ("plain", whole(model={"layer_types": ["evil"] * 3, "cache_fields": {}}), "no cache layer of the kind 'evil'"),
    "linear rows": ("linear", tensor("conv.0", lambda x: x[:1]), "the packed layers 2 rows"),
    "linear scalars": ("linear", tensor("conv.0", lambda x: x.flatten()[0]), "the packed layers 2 rows"),
    "history": ("plain", first_layer(history=60), "63 tokens of which 60 are packed do not fit"),
    "tokens": ("plain", first_layer(tokens=500), "500 tokens of which"),
    "rows": ("plain", first_layer(batch_size=3), r"key_codes is I16 \[2, .* expected is I16 \[3, "),
    "starts": ("padded", first_layer(starts=[0]), r"starts \[0\] are not one slot per row"),
    "starts before": ("padded", first_layer(starts=[0, -1]), r"starts \[0, -1\]"),
    "starts beyond": ("padded", first_layer(starts=[0, 1 << 40]), r"starts \[0, 1099511627776\]"),
    "starts of text": ("padded", first_layer(starts=["0", "7"]), "are not one slot per row"),
    "starts unknown": ("padded", first_layer(starts_known=None), "are not one slot per row"),
    "a tensor more": ("plain", lambda f: damage_tensors(f, lambda t: t.update(extra=torch.zeros(1))), "holds .*extra"),
    "a tensor less": ("plain", lambda f: damage_tensors(f, lambda t: t.pop("key_scale")), "expected are .*key_scale"),
    "no minimum": ("ranges", lambda f: damage_tensors(f, lambda t: t.pop("key_min")), "expected are .*key_min"),
    "no centers": ("plain", lambda f: damage_tensors(f, lambda t: t.pop("key_centers")), "expected are .*key_centers"),
    "centers nan": ("plain", tensor("key_centers", nan), "key_centers holds NaN"),
    "fewer centers": ("plain", tensor("key_centers", lambda x: x[:, :, :1]), r"key_centers is F16 \[2, 2, 1, 16\], expected"),
    "learned is text": ("plain", first_layer(learned="yes"), "learned is 'yes', allowed are true and false"),
    "not learned": ("plain", unlearned, "lacks constants that a cache learns"),
    "learned too much": ("ranges", learned, "holds constants that a cache learns .* does not: save"),
    "learned nan": ("plain", tensor("key_metric", lambda x: x * torch.nan), "key_metric holds NaN"),
    "no inverse": ("plain", tensor("key_inverse", lambda x: 2 * x), "do not give the identity"),
    "learned heads": ("plain", tensor("key_transform", lambda x: x[:1]), r"key_transform is F32 \[1, 16, 16\], expected"),
    "queries": ("short", first_layer(queries=-1), "queries is -1"),
    "a moment too many": ("short", first_layer(queries=0), "holds .*query_moment"),
    "a moment too few": ("plain", first_layer(queries=5), "expected are .*query_moment"),
    "moment nan": ("short", tensor("query_moment", lambda x: x * torch.inf), "query_moment holds NaN"),
    "tensor dtype": ("plain", tensor("value_scale", lambda x: x.float()), "value_scale is F32 .* expected is F16"),
    "tensor shape": ("plain", tensor("sink_keys", lambda x: x[:, :, :3]), r"sink_keys is F32 \[2, 2, 3, 16\], expected"),
    "scale nan": ("plain", tensor("key_scale", nan), "key_scale holds NaN"),
    "min nan": ("ranges", tensor("value_min", nan), "value_min holds NaN"),
    "scale zero": ("plain", tensor("key_scale", lambda x: x * 0), "key_scale holds values that are not positive"),
    "native tensors": ("hybrid", lambda f: damage_tensors(f, lambda t: t.update(more=torch.zeros(1))), "allowed are floating"),
    "native half": ("hybrid", lambda f: damage_tensors(f, lambda t: t.pop("keys")), "only one of keys and values"),
    "native integers": ("hybrid", tensor("keys", lambda x: x.int()), "allowed are floating"),
    "native tokens": ("hybrid", first_layer(tokens=5), "keys do not stand for 5 tokens"),
    "native shapes": ("hybrid", tensor("keys", lambda x: x[:, :1]), "keys do not stand for"),
    "native rows": ("hybrid", tensor("keys", lambda x: x[:1]), "the packed layers 2 rows"),
    "native kind": ("hybrid", first_layer(attends=False), "another kind of layer|allowed are floating"),
    "native lengths": ("hybrid", first_layer(tokens=60), "layers hold"),
    "linear states": ("linear", first_layer(linear={"0": {}, "1": {}}), "other linear states"),
    "linear kernel": ("linear", first_layer(linear={"0": {"conv_kernel_size": 3}}), "conv_kernel_size 3 does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_corruption_is_refused_in_its_own_words(name, good, tmp_path):
    source, damage, message = CORRUPTIONS[name]
    folder = shutil.copytree(good / source, tmp_path / "cache")
    OscarCache.load(folder)
    damage(folder)
    with pytest.raises((CacheStateError, ArtifactError), match=message):
        OscarCache.load(folder)


def test_layers_that_disagree_are_refused(good, tmp_path):
    folder = shutil.copytree(good / "plain", tmp_path / "cache")
    shorter = filled(tokens=59)[1]
    shorter.save_pretrained(tmp_path / "shorter")
    shutil.copy(tmp_path / "shorter" / "layer-00001.safetensors", folder)
    record = json.loads((tmp_path / "shorter" / CACHE_FILE).read_text())["layers"][1]
    damage_json(folder, lambda content: content["layers"].__setitem__(1, record))
    with pytest.raises(CacheStateError, match=r"layers hold \[62, 63\] tokens"):
        OscarCache.load(folder)


@pytest.mark.parametrize(
    "device, said", [("cuda", "sees no CUDA GPU"), ("gpu", "allowed are names"), (2.5, "allowed are names")]
)
def test_a_device_that_is_not_there(device, said, tmp_path):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    filled()[1].save_pretrained(tmp_path / "saved")
    with pytest.raises(OscarError, match=said):
        OscarCache.load(tmp_path / "saved", device=device)
