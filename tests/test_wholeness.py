"""What an interrupted or refused forward and a half-done operation leave behind: refused, or as if it had not been."""

import re
import warnings

import pytest
import torch
from tiny_models import prompt, tiny_model
from transformers import DynamicCache

from oscar_hf import CacheStateError, OscarCache
from oscar_hf.cache.wholeness import SEES_ALL_STATES
from oscar_hf.storage.layer_store import LayerStore
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = dict(recipe="hadamard", sink_tokens=4, recent_tokens=8)
FAMILIES = ["llama", "gemma3", "qwen3_next", "lfm2"]
both_kinds = pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])


class Interrupt(KeyboardInterrupt):
    pass


def new_cache(model, static, **options):
    return OscarCache(model.config, max_cache_len=160 if static else None, **{**SMALL, **options})


@torch.no_grad()
def forward(model, cache, ids, **arguments):
    return model(input_ids=ids, **{CACHE_ARGUMENT: cache}, **arguments).logits


def places(model):
    """Modules between whose calls a forward can stop: before, within and behind each layer."""
    for layer in model.model.layers:
        yield layer
        attention = (
            getattr(layer, "self_attn", None) or getattr(layer, "linear_attn", None) or getattr(layer, "conv", None)
        )
        last = [module for module in attention.modules() if isinstance(module, torch.nn.Linear)][-1]
        yield last
        yield layer.feed_forward if hasattr(layer, "feed_forward") else layer.mlp


def interrupted(model, cache, ids, place):
    def stop(*args):
        raise Interrupt

    hook = place.register_forward_pre_hook(stop)
    try:
        with pytest.raises(Interrupt):
            forward(model, cache, ids)
    finally:
        hook.remove()


@both_kinds
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("phase", ["prompt", "turn", "step"])
def test_no_interrupt_is_silent(family, static, phase):
    model, ids = tiny_model(family), prompt(1, 110)[0]
    held, stopped = {"prompt": (0, 60), "turn": (60, 80), "step": (60, 61)}[phase]
    # Steps of linear layers go unseen before transformers 5.24.
    sees_steps = SEES_ALL_STATES or family in ("llama", "gemma3")
    if phase == "step" and not sees_steps:
        pytest.skip("this transformers changes the states of linear layers without a word")
    silent = []
    for number, place in enumerate(places(model)):
        for more in (1, 20) if sees_steps else (20,):
            cache = new_cache(model, static)
            untroubled = new_cache(model, static)
            if held:
                forward(model, cache, ids[:, :held])
                forward(model, untroubled, ids[:, :held])
            interrupted(model, cache, ids[:, held:stopped], place)
            # A forward that stopped behind the last layer's cache has been stored whole.
            stored = new_cache(model, static)
            for begin, end in [(0, held), (held, stopped)][not held :]:
                forward(model, stored, ids[:, begin:end])
            expected = [forward(model, one, ids[:, held : held + more]) for one in (untroubled, stored)]
            try:
                got = forward(model, cache, ids[:, held : held + more])
            except CacheStateError:
                cache.reset()
                got = forward(model, cache, ids[:, : held + more])[:, -more:]
                fresh = forward(model, new_cache(model, static), ids[:, : held + more])[:, -more:]
                torch.testing.assert_close(got, fresh, atol=1e-5, rtol=1e-5)
                continue
            if not any(torch.allclose(got, one, atol=1e-5, rtol=1e-5) for one in expected):
                silent.append((number, more))
    assert not silent


@both_kinds
def test_crop_goes_back_to_what_all_layers_hold(static):
    model, ids = tiny_model("llama"), prompt(1, 110)[0]
    # A window so large that nothing leaves it: what was packed would stay packed.
    cache, untroubled = (new_cache(model, static, recent_tokens=128) for _ in range(2))
    for one in (cache, untroubled):
        forward(model, one, ids[:, :60])
        forward(model, one, ids[:, 60:61])
    interrupted(model, cache, ids[:, 61:62], model.model.layers[1])
    with pytest.raises(CacheStateError, match=r"call cache.crop\(61\)"):
        forward(model, cache, ids[:, 61:62])
    cache.crop(61)
    assert torch.equal(forward(model, cache, ids[:, 61:62]), forward(model, untroubled, ids[:, 61:62]))


@pytest.mark.parametrize("family", ["gemma3", "cohere2", "llama"])
def test_a_call_that_does_not_fit_reaches_no_layer(family):
    model, ids = tiny_model(family), prompt(1, 140)[0]
    cache, untroubled = (OscarCache(model.config, max_cache_len=100, **SMALL) for _ in range(2))
    for one in (cache, untroubled):
        forward(model, one, ids[:, :60])
    with pytest.raises(CacheStateError, match="holds 60 and was given 50 more"):
        forward(model, cache, ids[:, 60:110])
    assert torch.equal(forward(model, cache, ids[:, 60:80]), forward(model, untroubled, ids[:, 60:80]))


def test_padding_of_other_rows_reaches_no_layer():
    model, (ids, mask) = tiny_model("gemma3"), prompt(1, 60, (7,))
    cache, untroubled = new_cache(model, False), new_cache(model, False)
    cache.set_padding(mask)
    twice = dict(attention_mask=mask.repeat(2, 1))
    with pytest.raises(CacheStateError, match="padding was given for 1 rows, the model passed 2"):
        forward(model, cache, ids.repeat(2, 1), **twice)
    cache.set_padding(twice["attention_mask"])
    untroubled.set_padding(twice["attention_mask"])
    got, expected = (forward(model, one, ids.repeat(2, 1), **twice) for one in (cache, untroubled))
    assert torch.equal(got, expected)


OPERATIONS = {
    "selection of rows": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
    "reordering of beams": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repetition of rows": lambda cache: cache.batch_repeat_interleave(2),
    "crop": lambda cache: cache.crop(-3),
}


@both_kinds
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_stops_between_layers(name, static, monkeypatch, tmp_path):
    model, ids = tiny_model("llama"), prompt(2, 80)[0]
    cache = new_cache(model, static)
    forward(model, cache, ids[:, :60])
    method, seen = "crop" if name == "crop" else "select", []

    original = getattr(LayerStore, method)

    def stop(self, *args):
        seen.append(self)
        if len(seen) == 2:
            raise MemoryError
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LayerStore, method, stop)
        with pytest.raises(MemoryError):
            OPERATIONS[name](cache)
    refused = f"an earlier {name} stopped before all layers were changed"
    with pytest.raises(CacheStateError, match=refused):
        forward(model, cache, ids[:, 60:61])
    with pytest.raises(CacheStateError, match=refused):
        OPERATIONS[name](cache)
    with pytest.raises(CacheStateError, match=refused):
        cache.save_pretrained(tmp_path / "cache")
    cache.reset()
    assert torch.equal(forward(model, cache, ids[:, :60]), forward(model, new_cache(model, static), ids[:, :60]))


@both_kinds
def test_drafts_of_fewer_layers(static):
    """They leave the last layers out; what they add is taken back before the whole model goes on."""
    model, ids = tiny_model("llama"), prompt(1, 80)[0]
    cache, untroubled = (new_cache(model, static, recent_tokens=128) for _ in range(2))
    for one in (cache, untroubled):
        forward(model, one, ids[:, :60])
    layers = model.model.layers
    model.model.layers = layers[:1]
    for step in range(60, 64):
        forward(model, cache, ids[:, step : step + 1])
    model.model.layers = layers
    with pytest.raises(CacheStateError, match="layer 1 holds 60 tokens where the layers before it held 64"):
        forward(model, cache, ids[:, 64:65])
    cache.crop(60)
    assert torch.equal(forward(model, cache, ids[:, 60:61]), forward(model, untroubled, ids[:, 60:61]))


def test_a_model_without_its_first_layer():
    model, ids = tiny_model("llama", num_hidden_layers=3), prompt(1, 80)[0]
    model.model.layers = model.model.layers[1:]
    cache, exact = new_cache(model, False), DynamicCache()
    for begin, end in ((0, 10), (10, 11), (11, 12)):
        got, expected = (forward(model, one, ids[:, begin:end]) for one in (cache, exact))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@both_kinds
def test_a_torn_cache_is_not_saved(static, tmp_path):
    model, ids = tiny_model("llama"), prompt(1, 80)[0]
    cache = new_cache(model, static)
    forward(model, cache, ids[:, :60])
    interrupted(model, cache, ids[:, 60:61], model.model.layers[1])
    with pytest.raises(CacheStateError, match="layer 1 holds 60 tokens where the layers before it held 61"):
        cache.save_pretrained(tmp_path / "cache")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@both_kinds
def test_a_text_shorter_than_what_is_held(static, attn):
    """A template that drops earlier thoughts, and the same prompt again: generate() would go on in the middle. It is warned of or,
    where an older transformers hides the new tokens from themselves, refused."""
    model, ids = tiny_model("llama", attn), prompt(1, 139)[0]
    words = "shorter than the 142 tokens|begin like the ones that the cache holds"
    for shorter in (118, 100, 130):
        cache = OscarCache(model.config, max_cache_len=300 if static else None, **SMALL)
        options = {CACHE_ARGUMENT: cache, "max_new_tokens": 4, "do_sample": False, "disable_compile": True}
        model.generate(ids, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model.generate(ids[:, :shorter], **options)
            except CacheStateError as error:
                assert re.search(words, str(error))
                continue
        assert any(re.search(words, str(warning.message)) for warning in caught)


def test_a_next_turn_is_not_warned_of(recwarn):
    model, ids = tiny_model("llama"), prompt(1, 400)[0]
    cache = new_cache(model, False)
    for begin, end in ((0, 100), (100, 150), (150, 200), (200, 260), (260, 400)):
        forward(model, cache, ids[:, begin:end])
    assert not [warning for warning in recwarn if "oscar_hf: these tokens" in str(warning.message)]


WRONG_ROWS = [
    [2], [-3], [0, 7], torch.tensor([[0]]), torch.tensor([0.0]), [True], torch.zeros(2, dtype=torch.bool), "rows", None,
]  # fmt: skip


@both_kinds
@pytest.mark.parametrize("operation", ["batch_select_indices", "reorder_cache"])
@pytest.mark.parametrize("rows", WRONG_ROWS, ids=str)
def test_rows_that_are_not_there_change_nothing(rows, operation, static):
    model, ids = tiny_model("gemma3"), prompt(2, 80)[0]
    cache, untroubled = (new_cache(model, static) for _ in range(2))
    for one in (cache, untroubled):
        forward(model, one, ids[:, :60])
    with pytest.raises(CacheStateError, match="rows of the batch are chosen by|there is no row|no row would be left"):
        getattr(cache, operation)(rows)
    assert torch.equal(forward(model, cache, ids[:, 60:61]), forward(model, untroubled, ids[:, 60:61]))
