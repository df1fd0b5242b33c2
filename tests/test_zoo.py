"""RotationZoo folders (torch pickles of the published rotations): load, generate, refuse everything unsound."""

import pickle
import random

import pytest
import torch
from helpers import ZOO_V1, ZOO_V2, random_orthogonal, write_zoo, zoo_state
from transformers import LlamaConfig, LlamaForCausalLM

from oscar_hf import Artifact, OscarCache
from oscar_hf.artifact import rotation_zoo as zoo
from oscar_hf.errors import ArtifactError

LAYERS, HEADS, DIM, PROMPT, NEW = 30, 3, 64, 330, 4
KINDS = {"v1": ((DIM, DIM), 1, ZOO_V1), "v2": ((HEADS, DIM, DIM), 2, ZOO_V2)}


# ------------------------------------------------------------------------------------------------ load and generate
@pytest.fixture(scope="module", params=KINDS)
def smollm2_zoo(request, tmp_path_factory):
    shape, version, names = KINDS[request.param]
    folder = tmp_path_factory.mktemp("zoo") / "SmolLM2" / "seq20000"
    keys = zoo_state(range(LAYERS), *shape, version=version)
    return write_zoo(folder, keys, zoo_state(range(LAYERS), *shape, version=version, seed=100), names), keys


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=DIM, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_published_files_load_and_generate(smollm2_zoo, model):
    folder, keys = smollm2_zoo
    loaded = Artifact.load(folder.parent, subfolder="seq20000")
    assert sorted(loaded.layers) == list(range(LAYERS)) and loaded.config.recipe == "paper"
    for layer, constants in loaded.layers.items():
        assert torch.equal(constants.key_transform, keys["layers"][layer]["rotation"])
        assert torch.equal(constants.key_inverse, constants.key_transform.mT)
    # Needs no model config: the layers are all that these files say.
    cache = OscarCache.from_pretrained(folder)
    ids = torch.randint(3, 64, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    assert out.shape == (1, PROMPT + NEW) and cache.get_seq_length() == PROMPT + NEW - 1
    assert len(cache.oscar_layers) == LAYERS
    assert {layer.store.history for layer in cache.oscar_layers} == {cache.oscar_layers[0].store.history}
    assert cache.oscar_layers[0].store.history > 0, "both windows were crossed"


def test_a_zoo_artifact_becomes_one_of_ours(smollm2_zoo, tmp_path):
    loaded = Artifact.load(smollm2_zoo[0])
    again = Artifact.load(loaded.save(tmp_path))
    assert again.config == loaded.config
    for layer, constants in loaded.layers.items():
        for name, tensor in constants.tensors().items():
            assert torch.equal(tensor, getattr(again.layers[layer], name))


def test_a_zoo_of_another_model_is_refused(tmp_path, model):
    other = write_zoo(tmp_path / "a", zoo_state(range(LAYERS), 16, 16), zoo_state(range(LAYERS), 16, 16, seed=50))
    with pytest.raises(ArtifactError, match=r"KV heads of dim 16 .*the model has 3 of dim 64"), torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.long), past_key_values=OscarCache.from_pretrained(other))
    fewer = write_zoo(tmp_path / "b", zoo_state(range(28), DIM, DIM), zoo_state(range(28), DIM, DIM, seed=50))
    with pytest.raises(ArtifactError, match=r"no constants for the full-attention layers \[28, 29\]"):
        OscarCache.from_pretrained(fewer, config=model.config)


# ------------------------------------------------------------------------------------------------ what may differ
def small(seed=0, layers=range(8), **options):
    return zoo_state(layers, 16, 16, seed=seed, **options)


def test_the_hadamard_files_are_the_hadamard_recipe(tmp_path):
    folder = write_zoo(tmp_path, small(), small(99), ("k_rotation_hadamard.pt", "v_rotation_hadamard.pt"))
    loaded = Artifact.load(folder)
    assert loaded.config.recipe == "hadamard" and len(loaded.layers) == 8 and not loaded.is_data_free


def test_hybrid_models_have_global_layer_ids(tmp_path):
    ids = range(3, 24, 4)
    loaded = Artifact.load(write_zoo(tmp_path, small(layers=ids), small(99, layers=ids)))
    assert sorted(loaded.layers) == list(ids)
    with pytest.raises(ArtifactError, match="does not say which layers the model has: pass config"):
        OscarCache.from_pretrained(tmp_path)


def test_layer_keys_may_be_text_and_values_of_another_dim(tmp_path):
    keys, values = small(), zoo_state(range(8), 32, 32, seed=99)
    keys["layers"] = {str(layer): entry for layer, entry in keys["layers"].items()}
    loaded = Artifact.load(write_zoo(tmp_path, keys, values))
    assert sorted(loaded.layers) == list(range(8))
    assert (loaded.layers[0].key_dim, loaded.layers[0].value_dim) == (16, 32)


# ------------------------------------------------------------------------------------------------ refusals
def refused(folder, *words):
    """Message of the ArtifactError that loading raises, the same through the cache: one line with all the words."""
    with pytest.raises(ArtifactError) as caught:
        Artifact.load(folder)
    message = str(caught.value)
    assert "\n" not in message and "\033" not in message, message
    assert all(word in message for word in words), message
    with pytest.raises(ArtifactError) as again:
        OscarCache.from_pretrained(folder)
    assert str(again.value) == message


def entry(layer, **changes):
    return lambda state: state["layers"][layer].update(changes)


def top(**changes):
    return lambda state: state.update(changes)


def lose(*layers):
    return lambda state: [state["layers"].pop(layer) for layer in layers]


def rotation(layer, change):
    def apply(state):
        state["layers"][layer]["rotation"] = change(state["layers"][layer]["rotation"].clone())

    return apply


def with_nan(matrix):
    matrix[2, 3] = torch.nan
    return matrix


K, V = ZOO_V1
CORRUPT = {
    "wrong_shape": (rotation(2, lambda m: m[:8].clone()), [K, "layer 2", "[8, 16]", "allowed is float32 [D, D]"]),
    "vector": (rotation(2, lambda m: m[0].clone()), [K, "layer 2", "[16]"]),
    "empty": (rotation(2, lambda m: torch.zeros(0, 0)), [K, "layer 2", "[0, 0]"]),
    "not_orthogonal": (rotation(2, lambda m: m * 1.01), ["layer 2", "key_transform is not orthogonal", "0.005"]),
    "zeros": (rotation(2, torch.zeros_like), ["layer 2", "key_transform is not orthogonal"]),
    "nan": (rotation(2, with_nan), ["layer 2", "key_transform holds NaN"]),
    "infinite": (rotation(2, lambda m: m / 0), ["layer 2", "key_transform holds NaN or infinite"]),
    "missing_layer": (lose(4), [f"{K} lacks layers [4]"]),
    "missing_first_layer": (lose(0), [f"{K} lacks layers [0]"]),
    "missing_last_layer": (lose(7), ["do not hold the same layers", "[7]"]),
    "float16": (rotation(2, torch.Tensor.half), [K, "layer 2", "torch.float16", "float32"]),
    "float64": (rotation(2, torch.Tensor.double), [K, "layer 2", "torch.float64"]),
    "integers": (rotation(2, torch.Tensor.int), [K, "layer 2", "torch.int32"]),
    "sparse": (rotation(2, torch.Tensor.to_sparse), [K, "layer 2", "float32"]),
    "expanded": (rotation(2, lambda m: m[:1, :1].expand(1 << 20, 1 << 20)), [K, "layer 2", "[1048576, 1048576]"]),
    "mixed": (rotation(2, lambda m: m[None]), [K, "mixes rotations [D, D] and [KV heads, D, D]"]),
    "no_rotation": (lambda state: state["layers"][2].pop("rotation"), [K, "layer 2", "no rotation tensor"]),
    "rotation_list": (entry(2, rotation=[[1.0]]), [K, "layer 2", "no rotation tensor"]),
    "entry_list": (lambda state: state["layers"].update({2: [1]}), [K, "layer 2", "no rotation tensor"]),
    "layer_id": (entry(2, layer_id=5), [K, "layer 2 says it is layer 5"]),
    "layer_id_tensor": (entry(2, layer_id=torch.zeros(2)), [K, "layer 2 says it is layer"]),
    "negative_layer": (lambda state: state["layers"].update({-1: state["layers"][0]}), [K, "layer -1"]),
    "layer_name": (lambda state: state["layers"].update(first=state["layers"][0]), [K, "layer 'first'"]),
    "twice": (lambda state: state["layers"].update({"2": state["layers"][2]}), [K, "layer '2'"]),
    "far_layer": (lambda state: state["layers"].update({10**9: state["layers"][2]}), [K, "layer 1000000000"]),
    "format_99": (top(format_version=99), [K, "format_version 99", "(1, 2)"]),
    "format_none": (lambda state: state.pop("format_version"), [K, "format_version None"]),
    "format_true": (top(format_version=True), [K, "format_version True"]),
    "format_tensor": (top(format_version=torch.ones(2)), [K, "format_version tensor"]),
    "no_layers": (top(layers={}), [K, "is not a RotationZoo file"]),
    "layers_list": (top(layers=[1, 2]), [K, "is not a RotationZoo file"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupted_files_are_refused_each_in_its_own_words(tmp_path, case):
    change, words = CORRUPT[case]
    keys = small()
    change(keys)
    refused(write_zoo(tmp_path, keys, small(99)), *words)


def test_values_are_checked_as_keys_are(tmp_path):
    values = small(99)
    rotation(3, lambda m: m * 2)(values)
    refused(write_zoo(tmp_path / "a", small(), values), "layer 3", "value_transform is not orthogonal")
    heads = zoo_state(range(8), 2, 16, 16, version=2), zoo_state(range(8), 3, 16, 16, version=2)
    refused(write_zoo(tmp_path / "b", *heads, ZOO_V2), "value_", "[3, 16, 16]", "[2, 16, 16]")


@pytest.mark.parametrize("names", [ZOO_V1, ZOO_V2])
@pytest.mark.parametrize("absent", [0, 1])
def test_a_missing_file_is_named(tmp_path, names, absent):
    states = [small(), small(99)]
    states[absent] = None
    refused(write_zoo(tmp_path, *states, names), f"lacks {names[absent]}")


class Trap:
    """Unpickled without care, this creates a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["zip", "legacy", "bare", "system"])
def test_a_pickle_with_code_in_it_is_refused_and_not_run(tmp_path, form):
    folder, mark = write_zoo(tmp_path / "zoo", small(), small(99)), tmp_path / "mark"
    state = {"format_version": 1, "layers": {0: {"layer_id": 0, "rotation": Trap(mark)}}}
    if form in ("zip", "legacy"):
        torch.save(state, folder / K, _use_new_zipfile_serialization=form == "zip")
    elif form == "bare":
        (folder / K).write_bytes(pickle.dumps(state))
    else:
        (folder / K).write_bytes(f"cos\nsystem\n(S'touch {mark}'\ntR.".encode())
    refused(folder, K, "holds more than plain tensors", "could run code", "trust")
    assert not mark.exists()
    if form in ("zip", "legacy"):
        # The trap is real: an unrestricted load springs it.
        torch.load(folder / K, weights_only=False)["layers"][0]["rotation"].close()
        assert mark.exists()


DAMAGE = {
    "truncated": lambda data: data[: len(data) // 2],
    "one_byte_short": lambda data: data[:-1],
    "no_bytes": lambda data: b"",
    "text": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_files_are_refused(tmp_path, case, zipped):
    folder = write_zoo(tmp_path, small(), small(99))
    torch.save(small(), folder / K, _use_new_zipfile_serialization=zipped)
    (folder / K).write_bytes(DAMAGE[case]((folder / K).read_bytes()))
    refused(folder, f"{K} is not a sound torch file", "download it again")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False])
def test_no_flipped_byte_escapes_as_another_error(tmp_path, zipped):
    folder = write_zoo(tmp_path, None, small(99, layers=range(2)))
    torch.save(small(layers=range(2)), folder / K, _use_new_zipfile_serialization=zipped)
    sound, draw = (folder / K).read_bytes(), random.Random(0)
    for _ in range(60):
        data = bytearray(sound)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data) if zipped else 2000)] = draw.randrange(256)
        (folder / K).write_bytes(data)
        try:
            Artifact.load(folder)
        except ArtifactError as error:
            assert len(str(error)) < 1000


def test_a_list_instead_of_a_state_and_an_oversized_file_are_refused(tmp_path, monkeypatch):
    folder = write_zoo(tmp_path, [1, 2], small(99))
    refused(folder, f"{K} is not a RotationZoo file")
    monkeypatch.setattr(zoo, "_MAX_BYTES", 100)
    refused(folder, f"{K} has {(folder / K).stat().st_size} bytes, allowed are 100")


def test_a_parameter_that_asks_for_gradients_is_taken_as_a_constant(tmp_path):
    keys = small()
    keys["layers"][2]["rotation"] = torch.nn.Parameter(random_orthogonal(16, 16).float())
    loaded = Artifact.load(write_zoo(tmp_path, keys, small(99)))
    assert not loaded.layers[2].key_transform.requires_grad
