"""Artifacts and saved caches that the first format's code wrote: they load, mean what they meant, go on, and are written as
version 2. fixtures/version_1/README.md says how they were made."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import prompt, tiny_model

from oscar_hf import Artifact, ArtifactError, OscarCache, OscarConfig
from oscar_hf.artifact.artifact import CONFIG_FILE, TENSOR_FILE
from oscar_hf.artifact.recipes import PUBLISHED_STORAGE
from oscar_hf.cache.save_checks import CACHE_FILE

FIXTURES = Path(__file__).parent / "fixtures" / "version_1"
# What the caches of each folder are stored by.
STORAGE = {
    "calibrated": dict(PUBLISHED_STORAGE, key_center="mean", key_scale="weighted_search_both_ends", group_size=None),
    "hadamard": dict(PUBLISHED_STORAGE, key_symmetric=True, group_size=8),
    "zoo": dict(PUBLISHED_STORAGE, group_size=None),
}
each_cache = pytest.mark.parametrize("name", STORAGE)
each_kind = pytest.mark.parametrize("static", [False, True])


def load(name, folder=None, static=False):
    artifact = Artifact.load(FIXTURES / "zoo-rotations") if name == "zoo" else None
    return OscarCache.load(folder or FIXTURES / name, artifact=artifact, max_cache_len=96 if static else None)


def check_holds(name, cache):
    """The cache holds what the older code read from it when it was saved."""
    expected = load_file(FIXTURES / f"expected-{name}.safetensors")
    for index, layer in enumerate(cache.layers):
        assert (layer.store.held, layer.store.history, layer.store.padding.rows) == (53, 41, [0, 7])
        for kind in "kv":
            # Products of matrices may round otherwise on another machine.
            torch.testing.assert_close(layer.store.dense(kind), expected[f"{index}.{kind}"], atol=1e-5, rtol=1e-5)


@each_kind
@each_cache
def test_a_cache_holds_what_it_held(name, static):
    cache = load(name, static=static)
    check_holds(name, cache)
    for field, value in STORAGE[name].items():
        assert getattr(cache.oscar_config, field) == value, field
    assert cache.oscar_config.center_block == 0
    assert all(layer.store.statistics is None for layer in cache.layers), "nothing is learned"


@each_kind
@each_cache
def test_generation_goes_on_with_the_storage_of_then(name, static):
    model = tiny_model("llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    cache = load(name, static=static)
    first, mask = prompt(2, 50, (0, 7))
    ids, mask = torch.cat([first, first[:, :3], prompt(2, 7, seed=1)[0]], 1), torch.cat([mask, mask.new_ones(2, 10)], 1)
    out = model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=20, do_sample=False, disable_compile=True
    )
    assert out.shape == (2, 80) and int(cache.get_seq_length()) == 79
    layer = cache.layers[0]
    assert layer.store.history == 79 - 4 - 8 and layer.store.keys.rows.centers is None
    # What was packed since is what this code packs in a new cache of the same storage.
    fresh = OscarCache(model.config, artifact=cache.artifact, sink_tokens=4, recent_tokens=8, **STORAGE[name])
    mask = torch.cat([mask, mask.new_ones(2, 20)], 1)
    with torch.no_grad():
        for begin, end in ((0, 50), *((i, i + 1) for i in range(50, 79))):
            model(out[:, begin:end], attention_mask=mask[:, :end], past_key_values=fresh)
    # Row 0 of layer 0: attention does not enter, nor how positions of a padded row are counted.
    for got, expected in zip(layer.store.sides, fresh.layers[0].store.sides):
        for a, b in zip(got.rows.in_use(67).values(), expected.rows.in_use(67).values()):
            assert torch.equal(a[0], b[0])


@each_cache
def test_saving_again_writes_version_2(name, tmp_path):
    cache = load(name)
    cache.save_pretrained(tmp_path / "cache", include_artifact=name != "zoo")
    written = json.loads((tmp_path / "cache" / CACHE_FILE).read_text())
    assert written["format_version"] == 2 and written["storage"]["key_center"] == STORAGE[name]["key_center"]
    if name != "zoo":
        assert json.loads((tmp_path / "cache" / "artifact" / CONFIG_FILE).read_text())["format_version"] == 2
    for static in (False, True):
        check_holds(name, load(name, tmp_path / "cache", static))
    with pytest.raises(ArtifactError, match="saved with another artifact"):
        OscarCache.load(tmp_path / "cache", artifact=Artifact.data_free())


def test_the_artifact_may_stay_outside(tmp_path):
    """It is known by what version 1 wrote of it, whether it comes from a file or is a recipe."""
    for name, artifact in (
        ("calibrated", Artifact.load(FIXTURES / "calibrated" / "artifact")),
        ("calibrated", FIXTURES / "calibrated" / "artifact"),
        ("hadamard", Artifact.load(FIXTURES / "hadamard" / "artifact")),
        ("hadamard", Artifact.data_free("hadamard")),
    ):
        folder = shutil.copytree(FIXTURES / name, tmp_path / "cache", dirs_exist_ok=True)
        shutil.rmtree(folder / "artifact", ignore_errors=True)
        check_holds(name, OscarCache.load(folder, artifact=artifact))
        shutil.rmtree(folder)
    for name, other in (("calibrated", Artifact.data_free("hadamard")), ("hadamard", Artifact.data_free("default"))):
        with pytest.raises(ArtifactError, match="saved with another artifact"):
            OscarCache.load(FIXTURES / name, artifact=other)
    with pytest.raises(ArtifactError, match="saved without its artifact"):
        OscarCache.load(FIXTURES / "zoo")


def test_an_artifact_takes_the_storage_of_today(tmp_path):
    folder = FIXTURES / "calibrated" / "artifact"
    made = Artifact.load(folder)
    assert made.config == OscarConfig.from_recipe(
        "balanced", num_hidden_layers=2, num_key_value_heads=1, head_dim=16, value_head_dim=16, model_type="llama"
    )
    assert "balanced" in made.describe() and "centered by block of 128" in made.describe()
    again = Artifact.load(made.save(tmp_path))
    assert again.config == made.config
    before, after = load_file(folder / TENSOR_FILE), load_file(tmp_path / TENSOR_FILE)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    model = tiny_model("llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    cache = OscarCache(model.config, artifact=made, sink_tokens=4, recent_tokens=8)
    model.generate(prompt(1, 60)[0], past_key_values=cache, max_new_tokens=4)
    assert cache.layers[0].store.keys.rows.centers.any() and cache.layers[0].store.statistics is None
    # As version 1 stored it, for those who want that.
    cache = OscarCache(model.config, artifact=made, **STORAGE["calibrated"])
    assert cache.oscar_config.key_center == "mean"


def test_a_data_free_artifact_of_then_is_that_of_now():
    made = Artifact.load(FIXTURES / "hadamard" / "artifact")
    assert made.is_data_free and made.config == OscarConfig.from_recipe("hadamard")


@pytest.mark.parametrize("damage", [dict(key_center="mean"), dict(key_block=32)])
def test_a_cache_of_version_1_has_no_fields_of_version_2(damage, tmp_path):
    folder = shutil.copytree(FIXTURES / "calibrated", tmp_path / "cache")
    content = json.loads((folder / CACHE_FILE).read_text())
    content["storage"].update(damage)
    (folder / CACHE_FILE).write_text(json.dumps(content))
    with pytest.raises(Exception, match="lacks fields"):
        OscarCache.load(folder)
