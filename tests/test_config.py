"""OscarConfig: round trip through JSON, and one clear sentence for every invalid field."""

import dataclasses
import json

import pytest

from oscar_hf import OscarConfig
from oscar_hf.artifact.recipes import OVERRIDABLE, PUBLISHED_STORAGE, RECIPES
from oscar_hf.artifact.version_1 import former_fields
from oscar_hf.errors import ArtifactError, OscarError

FULL = dict(
    per_head=True, value_target="attention", key_symmetric=True, sink_tokens=4, recent_tokens=32, group_size=16,
    base_model="owner/name", base_model_revision="abc", model_type="gemma3", num_hidden_layers=3,
    layer_types=["full_attention", "sliding_attention", "full_attention"], num_key_value_heads=[2, 0, 4],
    head_dim=[32, 0, 64], value_head_dim=64,
    cache_fields={"sliding_window": 24}, calibration={"tokens": 20000, "text": "é"},
)  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fields", [{}, FULL], ids=["plain", "full"])
def test_json_round_trip(recipe, fields):
    config = OscarConfig.from_recipe(recipe, **fields)
    assert config.recipe == recipe
    text = config.to_json()
    assert OscarConfig.from_json(text) == config and OscarConfig.from_json(text).to_json() == text
    assert set(json.loads(text)) == {field.name for field in dataclasses.fields(OscarConfig)}


def test_recipes_are_what_the_design_says():
    transforms = {"default": ("whitened", "hadamard"), "hadamard": ("hadamard",) * 2, "balanced": ("balanced", "oscar")}
    for recipe, expected in (transforms | {"paper": ("oscar", "oscar")}).items():
        made = OscarConfig.from_recipe(recipe)
        assert (made.key_transform, made.value_transform) == expected
        assert made.needs_calibration == (recipe in ("balanced", "paper"))
        assert made.key_center == "block" and made.key_rule.feedback and made.value_rule.unbiased
        assert made.key_symmetric and made.value_symmetric
        assert (made.sink_tokens, made.recent_tokens, made.center_block) == (64, 256, 128)
    assert OscarConfig() == OscarConfig.from_recipe("default")
    assert set(RECIPES) == {*transforms, "paper"}
    published = OscarConfig.from_recipe("paper", **PUBLISHED_STORAGE)
    assert (published.key_rule.clip, published.value_rule.clip, published.center_block) == (0.96, 0.92, 0)
    assert not published.key_symmetric and not published.value_symmetric


def test_bits_of_the_default_recipe():
    """2.25 bits for keys (scale and center), 2.125 for values, at head dim 128."""
    config = OscarConfig()
    assert [config.side_format(kind, 128).bits for kind in ("key", "value")] == [2.25, 2.125]
    published = OscarConfig(**PUBLISHED_STORAGE)
    assert [published.side_format(kind, 128).bits for kind in ("key", "value")] == [2.25, 2.25]


@pytest.mark.parametrize(
    "recent,block", [(1, 32), (31, 32), (32, 32), (63, 32), (64, 64), (127, 64), (128, 128), (256, 128), (5000, 128)]
)
def test_a_block_is_no_longer_than_the_window(recent, block):
    assert OscarConfig(recent_tokens=recent).center_block == block
    for center in ("mean", "none"):
        assert OscarConfig(recent_tokens=recent, key_center=center).center_block == 0


def test_a_block_of_ones_own_choice():
    for block in (32, 64, 256):
        assert OscarConfig(key_block=block).center_block == block
    assert OscarConfig(recent_tokens=8, key_block=32).center_block == 32
    reach = r"null or a power of two from 32 to 256 \(recent_tokens is 256\)"
    for block in (16, 33, 512, 128.0, True, "128"):
        with pytest.raises(ArtifactError, match=f"key_block: got {block!r}, allowed is {reach}"):
            OscarConfig(key_block=block)
    with pytest.raises(ArtifactError, match=r"key_block: got 128, .* from 32 to 64 \(recent_tokens is 64\)"):
        OscarConfig(key_block=128).override(recent_tokens=64)


def test_feedback_needs_symmetric_keys():
    with pytest.raises(ArtifactError, match="key_scale: got 'feedback' with key_symmetric false, .*another key_scale"):
        OscarConfig(key_symmetric=False)
    assert not OscarConfig(key_symmetric=False, key_scale="weighted_search_both_ends").key_symmetric


COUNT = "an integer >= 1"
INVALID = [
    ("recipe", 5, "a name"),
    ("recipe", "", "a name"),
    ("key_transform", "fourier", "whitened, hadamard, identity, oscar, balanced"),
    ("key_transform", ["oscar"], "whitened, hadamard, identity, oscar, balanced"),
    ("value_transform", "balanced", "hadamard, identity, oscar"),
    ("value_transform", "whitened", "hadamard, identity, oscar"),
    ("value_target", "loss", "score, attention"),
    ("per_head", "yes", "true or false"),
    ("key_center", 1, "block, mean, none"),
    ("key_center", "blocks", "block, mean, none"),
    ("key_block", 48, "a power of two from 32 to 256"),
    ("key_symmetric", None, "true or false"),
    ("value_symmetric", 0, "true or false"),
    ("key_scale", "percentile(2)", "percentile(c)"),
    ("key_scale", 0.96, "percentile(c)"),
    ("value_scale", "weighted_search", "percentile(c) or search"),
    ("value_scale", "weighted_search_both_ends", "percentile(c) or search"),
    ("value_scale", "feedback", "percentile(c) or search"),
    ("sink_tokens", -1, "an integer >= 0"),
    ("sink_tokens", 1.5, "an integer >= 0"),
    ("sink_tokens", True, "an integer >= 0"),
    ("recent_tokens", 0, COUNT),
    ("recent_tokens", "256", COUNT),
    ("recent_tokens", 1 << 40, COUNT),
    ("group_size", 0, "null or an integer >= 1"),
    ("group_size", float("nan"), "null or an integer >= 1"),
    ("base_model", 7, "null or a string"),
    ("base_model_revision", ["x"], "null or a string"),
    ("model_type", {}, "null or a string"),
    ("num_hidden_layers", 0, "1 to 4096"),
    ("num_hidden_layers", 5000, "1 to 4096"),
    ("num_hidden_layers", [3], "1 to 4096"),
    ("layer_types", "full_attention", "a list of one name per layer"),
    ("layer_types", [1, 2], "a list of one name per layer"),
    ("num_key_value_heads", 0, COUNT),
    ("num_key_value_heads", [], COUNT),
    ("num_key_value_heads", [2, "2"], COUNT),
    ("head_dim", 64.0, COUNT),
    ("head_dim", [64, -1], COUNT),
    ("value_head_dim", "64", COUNT),
    ("cache_fields", None, "an object"),
    ("calibration", [], "an object"),
    ("format_version", 1, "2; update oscar_hf"),
    ("format_version", 3, "2; update oscar_hf"),
    ("format_version", True, "2; update oscar_hf"),
]


@pytest.mark.parametrize("field,value,allowed", INVALID)
def test_an_invalid_field_is_refused_by_name_value_and_what_is_allowed(field, value, allowed):
    with pytest.raises(ArtifactError) as caught:
        OscarConfig(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field}: ") and repr(value) in message and allowed in message
    assert "\n" not in message and isinstance(caught.value, OscarError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("field", ["layer_types", "num_key_value_heads", "head_dim", "value_head_dim"])
def test_lists_must_have_one_entry_per_layer(field):
    value = ["full_attention"] * 2 if field == "layer_types" else [8, 8]
    with pytest.raises(ArtifactError, match=rf"{field}: got a list of 2 entries, .*num_hidden_layers being 3"):
        OscarConfig(num_hidden_layers=3, **{field: value})


BAD_JSON = [
    ("", "not valid JSON"),
    ("{", "not valid JSON"),
    ("[" * 100_000, "not valid JSON"),
    ('{"sink_tokens": ' + "9" * 5000 + "}", "not valid JSON"),
    ("[]", "must hold a JSON object, got list"),
    ("null", "must hold a JSON object, got NoneType"),
    ("{}", "format_version: got None"),
    ('{"format_version": 99}', "format_version: got 99, this oscar_hf reads 1 to 2"),
    ('{"format_version": "1"}', "format_version: got '1'"),
    ('{"format_version": true}', "format_version: got True"),
    ('{"format_version": 1, "center_keys": 1}', "center_keys: got 1, allowed is true or false"),
    ('{"format_version": 2, "center_keys": true}', "unknown fields ['center_keys']: allowed are"),
    ('{"format_version": 2, "rotation": 3}', "unknown fields ['rotation']: allowed are"),
    ('{"format_version": 2, "sink_tokens": NaN}', "sink_tokens: got nan"),
    ('{"format_version": 1, "rotation": 3}', "unknown fields ['rotation']: allowed are"),
    ('{"format_version": 1, "sink_tokens": NaN}', "sink_tokens: got nan"),
    ('{"format_version": 1, "recent_tokens": Infinity}', "recent_tokens: got"),
    ('{"format_version": 1, "group_size": "128"}', "group_size: got '128'"),
]


@pytest.mark.parametrize("text,words", BAD_JSON, ids=range(len(BAD_JSON)))
def test_bad_json_is_refused_in_a_sentence(text, words):
    with pytest.raises(ArtifactError) as caught:
        OscarConfig.from_json(text)
    assert words in str(caught.value) and len(str(caught.value)) < 800


@pytest.mark.parametrize("recipe", ["papr", None, ["paper"]])
def test_unknown_recipe_is_refused(recipe):
    with pytest.raises(ArtifactError, match=r"unknown recipe .*default, hadamard, balanced, paper"):
        OscarConfig.from_recipe(recipe)


def test_group_size_in_use():
    sizes = {64: 64, 80: 80, 96: 96, 128: 128, 192: 96, 256: 128, 512: 128}
    assert {dim: OscarConfig().group_size_for(dim) for dim in sizes} == sizes
    assert OscarConfig(group_size=32).group_size_for(96) == 32
    with pytest.raises(
        ArtifactError, match=r"group_size: got 48, but it must divide the head dim 64: use one of 1, 2, 4, 8, 16,"
    ):
        OscarConfig(group_size=48).group_size_for(64)


def test_override_replaces_storage_fields_only():
    config = OscarConfig.from_recipe("paper", num_hidden_layers=2)
    changed = config.override(sink_tokens=0, recent_tokens=8, group_size=8, key_symmetric=True)
    assert (changed.sink_tokens, changed.recent_tokens, changed.num_hidden_layers) == (0, 8, 2)
    assert config.sink_tokens == 64, "the original is untouched"
    for name in {field.name for field in dataclasses.fields(OscarConfig)} - set(OVERRIDABLE):
        with pytest.raises(ArtifactError, match=f"'{name}' cannot be overridden.*sink_tokens"):
            config.override(**{name: getattr(config, name)})
    with pytest.raises(ArtifactError, match="recent_tokens: got 0"):
        config.override(recent_tokens=0)


def test_every_rule_can_be_put_on_every_artifact():
    """A metric that an artifact does not hold is learned from each sequence."""
    for recipe in RECIPES:
        config = OscarConfig.from_recipe(recipe)
        assert config.override(key_scale="weighted_search_both_ends").key_rule.both_ends
        assert config.override(key_scale="search").override(value_scale="search").value_rule.search


# What version 1 said by recipe, and a field of storage that somebody changed.
VERSION_1 = dict(
    paper=dict(
        key_transform="oscar", value_transform="oscar", center_keys=False, key_scale="percentile(0.96)",
        value_scale="percentile(0.92)", key_symmetric=False, value_symmetric=False,
    ),
    default=dict(
        key_transform="balanced", value_transform="oscar", per_head=True, center_keys=True,
        key_scale="weighted_search_both_ends", value_scale="percentile(0.92)", key_symmetric=False, value_symmetric=False,
    ),
    hadamard=dict(
        key_transform="hadamard", value_transform="hadamard", center_keys=False, key_scale="percentile(0.96)",
        value_scale="percentile(0.92)", key_symmetric=False, value_symmetric=False,
    ),
)  # fmt: skip


@pytest.mark.parametrize("recipe", VERSION_1)
def test_version_1_takes_the_storage_of_today(recipe):
    written = dict(VERSION_1[recipe], recipe=recipe, format_version=1, sink_tokens=7)
    config = OscarConfig.from_json(json.dumps(written))
    assert config.recipe == {"default": "balanced"}.get(recipe, recipe)
    now = OscarConfig.from_recipe(config.recipe, sink_tokens=7, per_head=written.get("per_head", True))
    assert config == now and config.format_version == 2


def test_what_version_1_leaves_out_is_what_it_was_then():
    config = OscarConfig.from_json('{"format_version": 1}')
    assert config == OscarConfig.from_recipe("balanced")
    assert former_fields(config, {"format_version": 1, "sink_tokens": 7}) == {
        "sink_tokens": 7, "recent_tokens": 256, "group_size": None, "recipe": "default", "key_transform": "balanced",
        "value_transform": "oscar", "per_head": True, "value_target": "score", "center_keys": True,
        "key_scale": "weighted_search_both_ends", "value_scale": "percentile(0.92)", "key_symmetric": False,
        "value_symmetric": False, "base_model": None, "base_model_revision": None, "model_type": None,
        "num_hidden_layers": None, "layer_types": None, "num_key_value_heads": None, "head_dim": None,
        "value_head_dim": None, "cache_fields": {}, "calibration": {}, "format_version": 1,
    }  # fmt: skip


@pytest.mark.parametrize("recipe", VERSION_1)
@pytest.mark.parametrize("own", [dict(key_scale="search"), dict(value_symmetric=True), dict(value_scale="search")])
def test_version_1_keeps_a_storage_of_ones_own(recipe, own):
    written = {**VERSION_1[recipe], **own}
    config = OscarConfig.from_json(json.dumps(dict(written, recipe=recipe, format_version=1)))
    center = "mean" if written.pop("center_keys") else "none"
    assert config.key_center == center and config.center_block == 0
    for name, value in written.items():
        assert getattr(config, name) == value


def test_geometry_by_layer():
    config = OscarConfig(**{**FULL, "value_head_dim": None})
    assert [config.per_layer("head_dim", i) for i in range(4)] == [32, 0, 64, None]
    assert config.per_layer("value_head_dim", 2) == 64, "as the keys unless said"
    assert OscarConfig(head_dim=64).per_layer("head_dim", 7) == 64
    assert OscarConfig().per_layer("head_dim", 0) is None


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OscarConfig().sink_tokens = 3
