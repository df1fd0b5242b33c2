"""Artifacts in folders: save and load bit for bit, refuse everything unsound, survive an interrupted save."""

import copy
import dataclasses
import json
import os
import pickle
import struct

import pytest
import torch
from helpers import calibrated_artifact, generator, random_orthogonal
from safetensors.torch import load_file, save_file

from oscar_hf import Artifact, OscarConfig
from oscar_hf.artifact import artifact
from oscar_hf.artifact.artifact import CONFIG_FILE, TENSOR_FILE
from oscar_hf.artifact.layer_constants import LayerConstants
from oscar_hf.errors import ArtifactError

CPU = torch.device("cpu")


def refused(folder, *words, **options):
    """Message of the ArtifactError that loading raises: one line with all the words in it."""
    with pytest.raises(ArtifactError) as caught:
        Artifact.load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    return message


def assert_same(one, other):
    assert one.config == other.config and sorted(one.layers) == sorted(other.layers)
    for layer, constants in one.layers.items():
        mine, theirs = constants.tensors(), other.layers[layer].tensors()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture
def saved(tmp_path):
    return calibrated_artifact().save(tmp_path / "made" / "here")


def rewrite(folder, change):
    """Change the tensors of a saved artifact in place: change(dict of tensors)."""
    tensors = load_file(folder / TENSOR_FILE)
    change(tensors)
    save_file(tensors, folder / TENSOR_FILE)
    return folder


def reconfigure(folder, **fields):
    """Change fields of oscar_config.json."""
    data = json.loads((folder / CONFIG_FILE).read_text())
    data.update(fields)
    (folder / CONFIG_FILE).write_text(json.dumps(data))
    return folder


# ------------------------------------------------------------------------------------------------ save and load
@pytest.mark.parametrize("fields", [{}, dict(value_dim=32), dict(heads=1), dict(layers=1, dim=24)])
def test_round_trip_is_exact(tmp_path, fields):
    made = calibrated_artifact(**fields)
    folder = made.save(tmp_path / "a")
    assert sorted(p.name for p in folder.iterdir()) == [CONFIG_FILE, TENSOR_FILE]
    loaded = Artifact.load(folder)
    assert_same(made, loaded)
    assert_same(made, Artifact.load(str(tmp_path), subfolder="a"))
    again = loaded.save(tmp_path / "b")
    for name in (CONFIG_FILE, TENSOR_FILE):
        assert (folder / name).read_bytes() == (again / name).read_bytes()


def test_an_inverse_that_is_the_transpose_is_not_stored(saved):
    names = set(load_file(saved / TENSOR_FILE))
    assert {f"layers.{i}.key_inverse" for i in range(3)} <= names
    assert not {name for name in names if name.endswith("value_inverse")}


def test_layers_may_share_a_tensor(tmp_path):
    eye = torch.eye(16)
    one = LayerConstants(eye, eye, eye, eye)
    config = OscarConfig.from_recipe("paper", num_hidden_layers=2, head_dim=16, num_key_value_heads=1)
    made = Artifact(config, {0: one, 1: one})
    assert_same(made, Artifact.load(made.save(tmp_path)))


def test_the_files_are_as_readable_as_any_other(saved):
    (saved / "other").write_text("")
    modes = {path.stat().st_mode for path in saved.iterdir()}
    assert len(modes) == 1


def test_data_free_artifacts_need_no_tensors(tmp_path):
    made = Artifact.data_free("hadamard", sink_tokens=3)
    assert made.is_data_free
    folder = made.save(tmp_path)
    assert [p.name for p in folder.iterdir()] == [CONFIG_FILE]
    loaded = Artifact.load(folder)
    assert loaded.is_data_free and loaded.config == made.config
    constants = loaded.constants(5, CPU, 96, 64)
    assert (constants.key_dim, constants.value_dim) == (96, 64)


def test_a_data_free_artifact_keeps_its_two_transforms_apart():
    made = Artifact.data_free("hadamard", value_transform="identity")
    constants = made.constants(0, CPU, 16, 16)
    assert torch.equal(constants.value_transform, torch.eye(16))
    assert not torch.equal(constants.key_transform, torch.eye(16))


@pytest.mark.parametrize("recipe", ["balanced", "paper"])
def test_a_recipe_that_needs_data_is_never_replaced_by_another(recipe):
    with pytest.raises(
        ArtifactError, match=f"recipe '{recipe}' needs calibrated statistics.*needs none: default, hadamard$"
    ):
        Artifact.data_free(recipe)


def test_recipes_without_data_are_found_not_listed(monkeypatch):
    monkeypatch.setitem(artifact.RECIPES, "plain", artifact.RECIPES["hadamard"] | {"key_transform": "identity"})
    assert Artifact.data_free("plain").is_data_free and Artifact.data_free().is_data_free
    with pytest.raises(ArtifactError, match="needs none: default, hadamard, plain$"):
        Artifact.data_free("balanced")


def test_no_recipe_is_the_default_one():
    assert Artifact.data_free().config == OscarConfig.from_recipe("default")


def test_provenance_is_added_to_a_copy():
    made = calibrated_artifact(calibration={"seed": 1})
    before = made.constants(0, CPU, 16, 16)
    copy = made.with_provenance({"text": "a book"}, source="somewhere")
    assert copy.config.calibration == {"seed": 1, "text": "a book"} and copy.source == "somewhere"
    assert made.config.calibration == {"seed": 1} and made.source == "memory"
    assert copy.constants(0, CPU, 16, 16) is before, "what lies on a device is there once"
    assert made.with_provenance({"seed": 2}).config.calibration == {"seed": 2}
    assert made.with_provenance().source == "memory"


def test_a_wrong_argument_is_named():
    with pytest.raises(
        TypeError, match="'revison': allowed are subfolder, revision, token, cache_dir, local_files_only"
    ):
        Artifact.load("somewhere", revison="main")


@pytest.mark.parametrize(
    "fields", [dict(value_transform="oscar"), dict(key_center="mean"), dict(key_transform="balanced")]
)
def test_hadamard_with_a_part_that_needs_data_is_not_data_free(tmp_path, fields):
    with pytest.raises(ArtifactError, match="needs calibrated statistics"):
        Artifact.data_free("hadamard", **fields)
    config = OscarConfig.from_recipe("hadamard", **fields)
    with pytest.raises(ArtifactError, match="need calibrated ones"):
        Artifact(config, {}).save(tmp_path)
    assert not list(tmp_path.iterdir()), "nothing was written"
    (tmp_path / CONFIG_FILE).write_text(config.to_json())
    refused(tmp_path, f"no {TENSOR_FILE}")


@pytest.mark.parametrize("rule", ["feedback", "weighted_search", "weighted_search_both_ends"])
def test_a_metric_is_learned_and_needs_no_data(tmp_path, rule):
    made = Artifact.data_free("hadamard", key_scale=rule)
    assert Artifact.load(made.save(tmp_path)).config == made.config


def test_constants_are_shared_and_copies_share_the_tensors():
    made = calibrated_artifact()
    first = made.constants(1, CPU, 16, 16)
    assert made.constants(1, CPU, 16, 16) is first
    assert copy.deepcopy(made) is made and copy.deepcopy(first) is first
    clone = pickle.loads(pickle.dumps(made))
    assert_same(made, clone)
    assert clone._on_device == {}
    with pytest.raises(ArtifactError, match="no constants for layer 3, only for 0-2"):
        made.constants(3, CPU, 16, 16)


def test_constants_invert():
    constants = calibrated_artifact().layers[0]
    key = torch.randn(2, 5, 16, generator=generator())
    query = torch.randn(2, 5, 16, generator=generator(1))
    kept = (query @ constants.key_query) @ (key @ constants.key_transform).mT
    assert torch.allclose(kept, query @ key.mT, atol=1e-4)
    assert constants.nbytes == sum(t.numel() * 4 for t in constants.tensors().values())


def test_describe_says_what_it_is(saved):
    text = Artifact.load(saved).describe()
    for words in (
        "recipe      balanced",
        "3 layers",
        "keys feedback symmetric",
        "centered by block of 128",
        "KV heads 2",
        "layers 0-2",
        "condition number 4",
        "sound",
    ):
        assert words in text


# ------------------------------------------------------------------------------------------------ refusals
def test_missing_things(tmp_path, saved):
    refused(tmp_path / "nowhere", "is not a folder", "owner/name")
    refused(tmp_path, CONFIG_FILE, "neither", "k_rotation_qqt_r_h_pbr.pt")
    refused(saved / CONFIG_FILE, "is not a folder")
    refused(saved, "subfolder 'x' does not exist", subfolder="x")
    (saved / TENSOR_FILE).unlink()
    refused(saved, f"has {CONFIG_FILE} but no {TENSOR_FILE}")


@pytest.mark.parametrize("subfolder", ["..", "../..", "a/../../b", "/etc", "..\\..", "C:\\x", "//host/share"])
def test_a_subfolder_cannot_lead_out_of_the_artifact(saved, subfolder):
    refused(saved, f"subfolder: got {subfolder!r}", "relative path", subfolder=subfolder)


def test_harmless_spellings_of_a_subfolder(saved):
    for subfolder in ("here", "here/", "./here", ".//here"):
        assert Artifact.load(saved.parent, subfolder=subfolder).layers
    for subfolder in ("", ".", "./"):
        assert Artifact.load(saved, subfolder=subfolder).layers


def put(name, value):
    return lambda tensors: tensors.__setitem__(f"layers.1.{name}", value)


def scale(name, factor):
    return lambda tensors: tensors[f"layers.1.{name}"].mul_(factor)


def spoil(name, value):
    return lambda tensors: tensors[f"layers.1.{name}"].view(-1).__setitem__(3, value)


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(names)]


NEAR_SINGULAR = torch.diag_embed(torch.tensor([1e-3] + [1.0] * 14 + [1e3])).expand(2, 16, 16).contiguous()
CORRUPT = {
    "wrong_shape": (put("key_transform", torch.eye(16)[:8].clone()), ["layers.1.key_transform", "[8, 16]", "[16, 16]"]),
    "wrong_dim": (put("value_transform", torch.eye(8)), ["value_transform", "[8, 8]", "does not fit its config"]),
    "wrong_heads": (put("key_transform", torch.eye(16).repeat(3, 1, 1)), ["[3, 16, 16]", "[2, 16, 16]"]),
    "wrong_mean": (put("key_mean", torch.zeros(16)), ["key_mean", "[16]", "[2, 16]"]),
    "no_dims": (put("key_mean", torch.zeros(())), ["key_mean", "[]", "[2, 16]"]),
    "four_dims": (put("key_metric", torch.zeros(1, 2, 16, 16)), ["key_metric", "[1, 2, 16, 16]"]),
    "empty": (put("key_transform", torch.zeros(2, 0, 0)), ["[2, 0, 0]", "holds nothing"]),
    "not_orthogonal": (scale("value_transform", 1.01), ["layer 1", "value_transform is not orthogonal", "0.005"]),
    "not_inverse": (scale("key_inverse", 1.01), ["layer 1", "key_transform and its inverse do not give the identity"]),
    "one_element_off": (spoil("key_inverse", 9.0), ["layer 1", "do not give the identity"]),
    "inverse_shape": (put("key_inverse", torch.eye(16)), ["key_inverse has shape [16, 16]", "[2, 16, 16]"]),
    "nan": (spoil("key_transform", torch.nan), ["layer 1", "key_transform holds NaN"]),
    "nan_mean": (spoil("key_mean", torch.nan), ["layer 1", "key_mean holds NaN"]),
    "infinite_metric": (spoil("key_metric", -torch.inf), ["layer 1", "key_metric holds NaN or infinite"]),
    "missing_layer": (drop("layers.1."), ["lacks layer 1 of 3"]),
    "missing_last_layers": (drop("layers.1.", "layers.2."), ["lacks layer 1-2 of 3"]),
    "missing_transform": (drop("layers.1.key_transform"), ["lacks layers.1.key_transform"]),
    "missing_everything": (drop("layers."), ["no layers", "'balanced'"]),
    "float16": (put("key_transform", torch.eye(16).repeat(2, 1, 1).half()), ["key_transform is F16", "float32"]),
    "float64": (put("key_mean", torch.zeros(2, 16).double()), ["key_mean is F64", "float32"]),
    "one_layer_too_many": (
        lambda t: t.update({k.replace("layers.1.", "layers.3."): v.clone() for k, v in t.items() if ".1." in k}),
        ["constants for layer 3", "num_hidden_layers is 3"],
    ),
    "unknown_name": (lambda t: t.update(extra=torch.zeros(1)), ["unknown tensor 'extra'", "layers.N.key_transform|"]),
    "unknown_field": (put("query_mean", torch.zeros(1)), ["unknown tensor 'layers.1.query_mean'"]),
    "second_spelling": (lambda t: t.update({"layers.01.key_mean": torch.zeros(2, 16)}), ["'layers.01.key_mean'"]),
    "other_digits": (lambda t: t.update({"layers.٣.key_mean": torch.zeros(2, 16)}), ["unknown tensor"]),
    "endless_number": (lambda t: t.update({f"layers.{'9' * 5000}.key_mean": torch.zeros(2, 16)}), ["unknown tensor"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupted_tensors_are_refused_each_in_its_own_words(saved, case):
    change, words = CORRUPT[case]
    refused(rewrite(saved, change), *words)


def test_what_a_recipe_does_not_use_may_be_missing(saved):
    """Keys are centered by blocks, and a metric that is not there is learned."""
    assert Artifact.load(rewrite(saved, drop("layers.1.key_mean", "layers.1.key_metric"))).layers[1].key_mean is None
    reconfigure(saved, key_center="mean")
    refused(saved, "layer 1", "key_center is 'mean' but there is no key_mean", "calibrate it again")


def test_a_nearly_singular_transform_is_refused(saved):
    def change(tensors):
        tensors["layers.1.key_transform"] = NEAR_SINGULAR
        tensors["layers.1.key_inverse"] = torch.linalg.inv(NEAR_SINGULAR).contiguous()

    refused(rewrite(saved, change), "layer 1", "key_transform is nearly singular", "condition number 1e+06")


GEOMETRY = [
    (dict(head_dim=32), "or [2, 32, 32]"),
    (dict(head_dim=[16, 32, 16]), "allowed is [32, 32]"),
    (dict(num_key_value_heads=4), "or [4, 16, 16]"),
    (dict(value_head_dim=8), "does not fit its config"),
    (dict(num_hidden_layers=2), "num_hidden_layers is 2"),
    (dict(num_hidden_layers=4), "lacks layer 3 of 4"),
    (dict(layer_types=["full_attention"] * 2), "one per layer"),
    (dict(format_version=3), "format_version: got 3, this oscar_hf reads 1 to 2"),
    (dict(key_transform="fourier"), "key_transform: got 'fourier'"),
]


@pytest.mark.parametrize("fields,words", GEOMETRY)
def test_a_config_of_another_artifact_is_refused(saved, fields, words):
    refused(reconfigure(saved, **fields), words)


def test_tensors_must_agree_where_the_config_does_not_say(saved):
    reconfigure(saved, head_dim=None, value_head_dim=None, num_key_value_heads=None)
    assert Artifact.load(saved).layers
    names = {"key_mean": torch.zeros(2, 8), "key_metric": torch.eye(8)}
    whole = load_file(saved / TENSOR_FILE)
    for name, tensor in names.items():
        rewrite(saved, put(name, tensor))
        refused(saved, "layer 1", f"{name} has shape {list(tensor.shape)}", "the transform has dim 16")
        save_file(whole, saved / TENSOR_FILE)
    rewrite(saved, put("key_mean", torch.zeros(3, 16)))
    refused(saved, "layer 1", "for 2 KV heads", "key_mean is for 3")


def write_safetensors(path, header, body=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)


HUGE = {"dtype": "F32", "shape": [1 << 31, 1 << 31], "data_offsets": [0, 1 << 62]}
FILES = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not tensors at all"),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "trailing": lambda path: path.write_bytes(path.read_bytes() + b"x" * 100),
    "header_cut": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "header_of_exabytes": lambda path: write_safetensors(path, {}, length=1 << 60),
    "tensor_of_exabytes": lambda path: write_safetensors(path, {"layers.0.key_transform": HUGE}),
    "shape_overflow": lambda path: write_safetensors(
        path, {"layers.0.key_transform": {**HUGE, "shape": [1 << 33, 1 << 33], "data_offsets": [0, 0]}}
    ),
    "negative_shape": lambda path: write_safetensors(path, {"layers.0.key_mean": {**HUGE, "shape": [-1, 16]}}),
    "not_json": lambda path: write_safetensors(path, b"{" * 10_000),
    "git_lfs_pointer": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_not_sound_are_refused(saved, case):
    FILES[case](saved / TENSOR_FILE)
    refused(saved, "not a sound safetensors file", "download or calibrate it again")


def test_a_config_that_is_not_text_is_refused(saved):
    (saved / CONFIG_FILE).write_bytes(b"\xff\xfe\x00{")
    refused(saved, "is not UTF-8 text")


@pytest.mark.parametrize("limit,name", [("_MAX_CONFIG_BYTES", CONFIG_FILE), ("_MAX_TENSOR_BYTES", TENSOR_FILE)])
def test_oversized_files_are_refused_before_they_are_read(saved, monkeypatch, limit, name):
    monkeypatch.setattr(artifact, limit, 100)
    refused(saved, f"{name} has {(saved / name).stat().st_size} bytes, allowed are 100")


# ------------------------------------------------------------------------------------------------ saving
def test_an_unsound_artifact_is_not_written(tmp_path):
    made = calibrated_artifact()
    for name, tensor in (("key_mean", torch.full((2, 16), torch.nan)), ("key_metric", torch.eye(16).double())):
        made.layers[1] = dataclasses.replace(calibrated_artifact().layers[1], **{name: tensor})
        with pytest.raises(ArtifactError, match=f"layer 1: {name}"):
            made.save(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def interrupt_tensors(monkeypatch):
    def fail(tensors, path, metadata):
        with open(path, "wb") as file:
            file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(artifact, "save_file", fail)


def interrupt_config(monkeypatch):
    monkeypatch.setattr(OscarConfig, "to_json", lambda self: 1 / 0)


@pytest.mark.parametrize("interrupt", [interrupt_tensors, interrupt_config])
def test_an_interrupted_save_leaves_the_old_artifact_or_none(tmp_path, saved, monkeypatch, interrupt):
    before, other = snapshot(saved), calibrated_artifact(seed=500, sink_tokens=7)
    interrupt(monkeypatch)
    for folder in (saved, tmp_path / "new"):
        with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
            other.save(folder)
    assert snapshot(saved) == before, "and no temporary file stays"
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("failing", [TENSOR_FILE, CONFIG_FILE])
def test_no_interruption_pairs_an_old_config_with_new_tensors(saved, monkeypatch, failing):
    real, before, failed = os.replace, snapshot(saved), []

    def replace(source, target):
        if str(target).endswith(failing) and not failed:
            failed.append(target)
            raise KeyboardInterrupt
        real(source, target)

    other = calibrated_artifact(seed=500, sink_tokens=7)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            other.save(saved)
    assert snapshot(saved) == before
    assert_same(other, Artifact.load(other.save(saved)))


def test_saving_over_another_artifact_leaves_nothing_of_it(saved):
    other = calibrated_artifact(layers=1, dim=8, heads=1, seed=9)
    assert_same(other, Artifact.load(other.save(saved)))
    free = Artifact.data_free("hadamard")
    free.save(saved)
    assert [path.name for path in saved.iterdir()] == [CONFIG_FILE]
    assert Artifact.load(saved).is_data_free


def test_hybrid_models_have_constants_for_their_full_layers_only(tmp_path):
    types = ["sliding_attention", "full_attention"] * 2
    whole = calibrated_artifact(layers=4, layer_types=types)
    with_gaps = Artifact(whole.config, {1: whole.layers[1], 3: whole.layers[3]})
    assert_same(with_gaps, Artifact.load(with_gaps.save(tmp_path / "a")))
    with pytest.raises(ArtifactError, match="lacks layer 3 of 4"):
        Artifact(whole.config, {1: whole.layers[1]}).save(tmp_path / "b")


def test_orthogonality_is_judged_by_the_published_tolerance(tmp_path):
    config = OscarConfig.from_recipe("paper", num_hidden_layers=1, head_dim=16, num_key_value_heads=1)
    for size, sound in ((1e-3, True), (1e-2, False)):
        key = random_orthogonal(16, 16).float()
        key[0] *= 1 + size
        made = Artifact(config, {0: LayerConstants(key, key.mT, torch.eye(16), torch.eye(16))})
        if sound:
            made.save(tmp_path)
        else:
            with pytest.raises(ArtifactError, match="not orthogonal"):
                made.save(tmp_path)


def test_an_artifact_that_says_it_saw_too_little_text_is_refused():
    layers = {0: LayerConstants.data_free("hadamard", "hadamard", 16, 16)}
    few = OscarConfig.from_recipe("paper", calibration={"tokens": 100})
    with pytest.raises(ArtifactError, match="calibrated on 100 tokens, allowed are at least 2048"):
        Artifact(few, layers).validate()
