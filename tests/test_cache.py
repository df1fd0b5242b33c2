"""OscarCache and OscarLayer: regions, counters, operations on packed data, memory report, errors."""

import copy
import pickle

import pytest
import torch
from dense_cache import DenseCache
from helpers import calibrated_artifact
from tiny_models import prompt, tiny_config, tiny_model

from oscar_hf import Artifact, ArtifactError, CacheStateError, OscarCache, OscarError, UnsupportedModelError
from oscar_hf.cache.layer import OscarLayer
from oscar_hf.storage.layer_store import LayerStore
from oscar_hf.storage.waiting_prompt import DRAFT_MARGIN

WINDOWS = dict(sink_tokens=4, recent_tokens=8)


def new_cache(kind=OscarCache, **overrides):
    return kind(tiny_config("llama"), recipe="hadamard", **{**WINDOWS, **overrides})


def states(count, batch=2, heads=2, dim=16, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, count, dim, generator=generator).to(dtype) for _ in range(2))


def fill(layer, keys, values, *bounds):
    """Update a layer with consecutive pieces of keys and values."""
    for begin, end in zip(bounds, bounds[1:]):
        layer.update(keys[:, :, begin:end], values[:, :, begin:end])


def one_layer(**overrides):
    return new_cache(**overrides).layers[0]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11, 12, 13, 60, 101])
def test_windows_are_exact_and_history_is_the_quantizers(length):
    keys, values = states(length)
    layer = one_layer()
    fill(layer, keys, values, 0, length)
    layer.store.place_waiting()
    dense = layer.store.dense("k")
    exact_from = 4 + layer.store.history
    assert dense.shape == keys.shape
    assert torch.equal(dense[:, :, :4], keys[:, :, :4])
    assert torch.equal(dense[:, :, exact_from:], keys[:, :, exact_from:])
    if layer.store.history:
        error = (dense - keys)[:, :, 4:exact_from].abs().max()
        assert 0 < error < 4


@pytest.mark.parametrize("options", [dict(key_center="none"), dict(recent_tokens=40), dict(recent_tokens=32)])
def test_codes_do_not_depend_on_how_tokens_arrive(options):
    """Prompt, chunks, single tokens and draft bursts that are partly cropped all leave the same codes and centers: a block of 32
    keys is no longer than the window."""
    keys, values = states(120)
    ways = {
        "prompt": [(0, 100), *((i, i + 1) for i in range(100, 120))],
        "chunks": [(0, 50), (50, 100), *((i, i + 1) for i in range(100, 120))],
        "single": [(i, i + 1) for i in range(120)],
    }
    layers = {}
    for name, pieces in ways.items():
        layers[name] = one_layer(**options)
        for begin, end in pieces:
            layers[name].update(keys[:, :, begin:end], values[:, :, begin:end])
    drafts = layers["drafts"] = one_layer(**options)
    drafts.update(keys[:, :, :90], values[:, :, :90])
    at = 90
    while at < 120:
        wrong = states(5, seed=at)
        take = min(2, 120 - at)
        burst = [torch.cat([x[:, :, at : at + take], w], 2) for x, w in zip((keys, values), wrong)]
        drafts.update(*burst)
        drafts.crop(-5)
        at += take
    drafts.update(*states(1, seed=7))
    drafts.crop(-1)
    reference = layers.pop("single")
    for name, layer in layers.items():
        assert layer.get_seq_length() == 120, name
        both = min(layer.store.history, reference.store.history)
        assert both >= 120 - 4 - options.get("recent_tokens", 8) - 1
        for got, expected in zip(layer.store.sides, reference.store.sides):
            for a, b in zip(got.rows.in_use(both).values(), expected.rows.in_use(both).values()):
                assert torch.equal(a, b), name


def test_exact_tokens_stay_bounded_over_a_long_decode():
    keys, values = states(1, batch=1)
    layer = one_layer()
    layer.update(*states(30, batch=1))
    for step in range(2500):
        layer.update(keys, values)
        assert layer.store.tokens == 31 + step
        assert layer.store.tokens - 4 - layer.store.history <= max(8, 8 - 1 + min(30, DRAFT_MARGIN) if step == 0 else 8)
    assert layer.store.keys.rows.capacity < 2 * layer.store.history


@pytest.mark.parametrize("keep", [119, 113, 112, 60, 5, 4, 3, 0])
def test_crop_then_append(keep):
    keys, values = states(160)
    layer = one_layer()
    fill(layer, keys, values, 0, 100, *range(101, 121))
    before = layer.store.dense("k")
    layer.crop(keep - 120)
    assert layer.get_seq_length() == keep
    assert torch.equal(layer.store.dense("k"), before[:, :, :keep])
    fill(layer, keys[:, :, keep:], values[:, :, keep:], *range(0, 41))
    assert layer.store.tokens == keep + 40
    dense = layer.store.dense("k")
    history = layer.store.history
    assert torch.equal(dense[:, :, :4], keys[:, :, :4])
    assert torch.equal(dense[:, :, 4 + history :], keys[:, :, 4 + history : keep + 40])
    assert layer.store.tokens - 4 - history == 8


def test_crop_understands_the_older_absolute_form_and_refuses_nothing_silently():
    layer = one_layer()
    layer.update(*states(50))
    layer.crop(30)
    assert layer.get_seq_length() == 30
    layer.crop(0)
    assert layer.get_seq_length() == 30
    layer.crop(-500)
    assert layer.get_seq_length() == 0


def test_batch_operations_are_bit_identical_gathers():
    keys, values = states(80, batch=3)
    layer = one_layer()
    fill(layer, keys, values, 0, 60, *range(61, 81))
    dense = layer.store.dense("v")
    order = torch.tensor([2, 2, 0, 1])
    layer.reorder_cache(order)
    assert torch.equal(layer.store.dense("v"), dense[order])
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.store.dense("v"), dense[order].repeat_interleave(2, 0))
    layer.batch_select_indices(torch.tensor([True] + [False] * 7))
    assert torch.equal(layer.store.dense("v"), dense[2:])
    assert layer.batch_size == 1


def test_deepcopy_and_pickle_copy_packed_data_and_share_constants():
    cache = new_cache()
    model = tiny_model("llama")
    ids, _ = prompt(1, 60)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        twin, loaded = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
        assert twin.layers[0].constants is cache.layers[0].constants
        assert twin.layers[0].store.keys.rows.codes.data_ptr() != cache.layers[0].store.keys.rows.codes.data_ptr()
        outputs = [model(input_ids=ids[:, :1], past_key_values=c).logits for c in (cache, twin, loaded)]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    cache.crop(-61)
    assert twin.get_seq_length() == 61


def test_reset_and_reuse():
    model = tiny_model("llama")
    ids, mask = prompt(2, 60, (0, 9))
    cache = new_cache()
    options = dict(attention_mask=mask, past_key_values=cache, max_new_tokens=10, do_sample=False)
    first = model.generate(ids, **options)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.layers[0].store.padding.rows == []
    assert torch.equal(first, model.generate(ids, **options))


def test_beam_search_runs_and_keeps_the_best_beam():
    model = tiny_model("llama")
    ids, mask = prompt(2, 40, (0, 6))
    results = []
    for dense in (False, True):
        cache = new_cache(DenseCache if dense else OscarCache)
        if dense:
            cache.set_padding(mask.repeat_interleave(3, 0))
        results.append(
            model.generate(
                ids, attention_mask=mask, past_key_values=cache, num_beams=3, max_new_tokens=12, do_sample=False
            )
        )
    assert torch.equal(*results)


def test_offloading_gives_the_same_tokens():
    model = tiny_model("llama")
    ids, mask = prompt(1, 60)
    plain, offloaded = (
        model.generate(
            ids, attention_mask=mask, past_key_values=new_cache(offloading=flag), max_new_tokens=8, do_sample=False
        )
        for flag in (False, True)
    )
    assert torch.equal(plain, offloaded)


def test_an_offloaded_layer_is_fetched_before_its_tokens_are_compared(monkeypatch):
    """The device "meta", which no tensor of the CPU may meet, stands for the far one."""
    away = {}

    def offload(store):
        store.place_waiting()
        if store not in away:
            away[store] = store.sides
            store._map(lambda tensor: tensor.to("meta"))

    def prefetch(store):
        if store in away:
            store.keys, store.values = away.pop(store)

    monkeypatch.setattr(LayerStore, "offload", offload)
    monkeypatch.setattr(LayerStore, "prefetch", prefetch)
    model = tiny_model("llama")
    cache = OscarCache(model.config, recipe="hadamard", sink_tokens=32, recent_tokens=16, offloading=True)
    with torch.no_grad():
        model(prompt(1, 100)[0], past_key_values=cache)
        assert cache.layers[0].store in away
        model(prompt(1, 30, seed=2)[0], past_key_values=cache)
    assert cache.get_seq_length() == 130


def test_stale_handles_are_refused():
    layer = one_layer()
    layer.update(*states(30))
    keys, values = layer.update(*states(1))
    layer.update(*states(1))
    with pytest.raises(CacheStateError, match="earlier update"):
        torch.nn.functional.scaled_dot_product_attention(torch.randn(2, 2, 1, 16), keys, values)


def test_wrong_states_are_refused_and_leave_the_cache_as_it_was():
    layer = one_layer()
    layer.update(*states(30))
    layer.store.place_waiting()
    before = layer.store.dense("k")
    for bad, message in (
        (states(1, batch=3), "batch"),
        (states(1, heads=4), "KV heads"),
        (states(1, dim=32), "key dim"),
    ):
        with pytest.raises(CacheStateError, match=message):
            layer.update(*bad)
    assert torch.equal(layer.store.dense("k"), before)
    with pytest.raises(UnsupportedModelError, match="multiples of 8"):
        one_layer().update(*states(1, dim=12))
    with pytest.raises(UnsupportedModelError, match="no latent"):
        one_layer().update(torch.randn(1, 1, 4, 32), torch.randn(1, 2, 4, 16))


def test_arguments_are_checked():
    config = tiny_config("llama")
    with pytest.raises(ArtifactError, match="got both"):
        OscarCache(config, artifact=Artifact.data_free(), recipe="hadamard")
    with pytest.raises(ArtifactError, match="needs calibrated statistics"):
        OscarCache(config, recipe="balanced")
    with pytest.raises(ArtifactError, match="unknown recipe"):
        OscarCache(config, recipe="best")
    with pytest.raises(ArtifactError, match="unknown arguments.*sink"):
        OscarCache(config, recipe="hadamard", sinks=3)
    with pytest.raises(ArtifactError, match="recent_tokens"):
        OscarCache(config, recipe="hadamard", recent_tokens=0)
    for given in (dict(), dict(recipe="hadamard"), dict(artifact=calibrated_artifact(without=["key_mean"]))):
        with pytest.raises(
            ArtifactError, match="key_center: got 'mean', but .* holds no key means: use 'block' or 'none'"
        ):
            OscarCache(config, key_center="mean", **given)
    assert OscarCache(config, key_center="mean", artifact=calibrated_artifact()).oscar_config.center_block == 0
    with pytest.raises(ArtifactError, match="from_pretrained"):
        OscarCache("some-folder")
    with pytest.raises(OscarError, match="max_cache_len"):
        OscarCache(config, recipe="hadamard", max_cache_len=0)
    with pytest.raises(UnsupportedModelError, match=r"model\.config"):
        OscarCache({"num_hidden_layers": 2}, recipe="hadamard")
    with pytest.raises(ArtifactError, match="group_size.*must divide the head dim"):
        OscarCache(config, recipe="hadamard", group_size=12)


@pytest.mark.parametrize("artifact", [123, ["a"], "", "hadamard"])
def test_what_names_no_artifact_is_refused(artifact):
    said = "is a recipe.*recipe='hadamard'" if artifact == "hadamard" else "folder or a Hub repository id"
    with pytest.raises(ArtifactError, match=said):
        OscarCache(tiny_config("llama"), artifact=artifact)


@pytest.mark.parametrize(
    "operation, given, said",
    [
        ("crop", 1.5, "crop takes a whole number, got 1.5"),
        ("crop", True, "crop takes a whole number, got True"),
        ("batch_repeat_interleave", 0, "takes a whole number from 1 on, got 0"),
        ("set_padding", [[0, 1]], "must be a tensor .*, got list"),
    ],
)
@pytest.mark.parametrize("room", [{}, dict(max_cache_len=64)])
def test_operations_refuse_what_they_cannot_mean(operation, given, said, room):
    model = tiny_model("llama")
    cache = OscarCache(model.config, recipe="hadamard", **room)
    with torch.no_grad():
        model(input_ids=prompt(1, 30)[0], past_key_values=cache)
    with pytest.raises(CacheStateError, match=said):
        getattr(cache, operation)(given)
    assert int(cache.get_seq_length()) == 30


@pytest.mark.parametrize("family", ["falcon_h1", "mistral_sliding"])
def test_group_sizes_matter_to_packed_layers_alone(family):
    with pytest.warns(UserWarning, match="nothing is quantized"):
        OscarCache(tiny_config(family), recipe="hadamard", group_size=48)


def test_padding_may_be_stated_only_before_the_first_tokens():
    cache = new_cache()
    cache.set_padding(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    assert cache.layers[0].store.padding.rows == [2, 0]
    cache.layers[0].update(*states(20))
    with pytest.raises(CacheStateError, match="before the first tokens"):
        cache.set_padding(torch.ones(2, 20))


def test_masked_rows_give_zero_not_nan():
    layer = one_layer()
    fill(layer, *states(60), 0, 60)
    keys, values = layer.update(*states(1))
    mask = torch.ones(2, 1, 1, 61, dtype=torch.bool)
    mask[1] = False
    out = torch.nn.functional.scaled_dot_product_attention(torch.randn(2, 2, 1, 16), keys, values, attn_mask=mask)
    assert torch.isfinite(out).all() and (out[1] == 0).all() and (out[0] != 0).any()


def test_gradients_flow_through_the_dense_path():
    model = tiny_model("llama")
    cache = new_cache()
    ids, _ = prompt(1, 60)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    embedded = model.get_input_embeddings()(ids[:, :3]).detach().requires_grad_(True)
    with pytest.warns(UserWarning, match="dequantized"):
        model(inputs_embeds=embedded, past_key_values=cache).logits.sum().backward()
    assert torch.isfinite(embedded.grad).all() and embedded.grad.abs().sum() > 0


def test_only_the_latest_layer_holds_its_prompt():
    model = tiny_model("llama")
    cache = new_cache()
    ids, _ = prompt(1, 200)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    assert [layer.store.waiting is not None for layer in cache.layers] == [False, False, True]


def test_memory_report_adds_up():
    model = tiny_model("qwen3", num_hidden_layers=2)
    cache = OscarCache(model.config, recipe="hadamard")
    assert cache.memory_report().total_bytes == 0
    with torch.no_grad():
        model(input_ids=prompt(2, 700)[0], past_key_values=cache)
    report = cache.memory_report()
    assert report.total_bytes == sum(report.by_region.values()) == sum(layer.total_bytes for layer in report.layers)
    assert report.bf16_bytes == 2 * 2 * 700 * 2 * 2 * (64 + 64)
    rows = cache.layers[0].store.keys.rows
    assert report.layers[0].regions["codes"] == 2 * rows.codes.nbytes
    assert rows.capacity <= 700
    # One int16 word holds 8 codes: 2 bits an element.
    assert rows.codes.nbytes * 8 == rows.capacity * 2 * 2 * 64 * 2
    assert report.bits_per_element > 2.5
    assert "total" in str(report) and "0-1" in str(report)


def test_cache_without_a_model_config_comes_from_the_artifact(tmp_path):
    artifact = Artifact.data_free(num_hidden_layers=3, layer_types=["full_attention"] * 3)
    artifact.save(tmp_path)
    cache = OscarCache.from_pretrained(tmp_path, **WINDOWS)
    assert [type(layer) for layer in cache.layers] == [OscarLayer] * 3
    model = tiny_model("llama")
    model.generate(prompt(1, 30)[0], past_key_values=cache, max_new_tokens=3)
    too_deep = tiny_model("llama", num_hidden_layers=4)
    with pytest.raises(ArtifactError, match="layer 3"):
        too_deep.generate(prompt(1, 30)[0], past_key_values=OscarCache.from_pretrained(tmp_path), max_new_tokens=3)
    with pytest.raises(ArtifactError, match="3 cache layers"):
        OscarCache.from_pretrained(tmp_path, config=too_deep.config)


def test_uniform_eager_weights_are_not_padding():
    """A prompt of one repeated token gives uniform weights where there are no positions; nothing of it may be dropped."""
    model = tiny_model("llama", "eager")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    ids = torch.full((1, 20), 5)
    cache = new_cache(recent_tokens=64)
    with torch.no_grad():
        got = [
            model(input_ids=ids, past_key_values=cache).logits,
            model(input_ids=ids[:, :1], past_key_values=cache).logits,
        ]
        expected = model(input_ids=torch.full((1, 21), 5)).logits
    assert cache.layers[0].store.padding.rows == []
    torch.testing.assert_close(torch.cat(got, 1), expected, atol=1e-4, rtol=1e-3)


def test_a_mask_that_shows_dropped_tokens_is_refused():
    model = tiny_model("llama")
    ids, mask = prompt(1, 40)
    mask[:, :10] = 0
    cache = new_cache(sink_tokens=16)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(CacheStateError, match="the first mask hid"):
            model(input_ids=ids[:, :3], attention_mask=torch.ones(1, 43, dtype=torch.long), past_key_values=cache)


def test_prompt_in_inference_mode_then_outside():
    model = tiny_model("llama")
    ids, _ = prompt(1, 60)
    caches = [new_cache(), new_cache()]
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=caches[0])
    with torch.no_grad():
        model(input_ids=ids, past_key_values=caches[1])
        outputs = [model(input_ids=ids[:, :5], past_key_values=cache).logits for cache in caches]
        caches[0].reset()
        model(input_ids=ids, past_key_values=caches[0])
        caches[0].reorder_cache(torch.tensor([0, 0]))
        model(input_ids=ids[:, :1].expand(2, 1), past_key_values=caches[0])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_autocast_packs_and_attends_in_our_dtypes(attn):
    model = tiny_model("llama", attn)
    ids, _ = prompt(1, 60)
    handles, dense = new_cache(), new_cache(DenseCache)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for cache in (handles, dense):
            model(input_ids=ids, past_key_values=cache)
        got, expected = (
            model(input_ids=ids[:, :2], past_key_values=cache).logits.float() for cache in (handles, dense)
        )
    assert torch.linalg.vector_norm(got - expected) < 0.05 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("count", [3, 40])
def test_gradients_reach_the_new_tokens_as_with_a_dense_cache(count):
    model = tiny_model("llama")
    ids, _ = prompt(1, 60)
    embedded = model.get_input_embeddings()(ids).detach()
    gradients = []
    for cache in (OscarCache(model.config, recipe="hadamard"), None):
        new = embedded[:, 10 : 10 + count].clone().requires_grad_(True)
        with torch.no_grad():
            past = model(input_ids=ids[:, :10], past_key_values=cache, use_cache=True).past_key_values
        model(inputs_embeds=new, past_key_values=past).logits.square().sum().backward()
        gradients.append(new.grad)
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_padding_is_learnt_also_with_gradients(attn):
    model = tiny_model("llama", attn)
    ids, mask = prompt(2, 40, (0, 13))
    cache = new_cache()
    model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    cache.commit()
    assert cache.layers[0].store.padding.rows == [0, 13]


def test_padding_of_another_batch_is_refused():
    cache = new_cache()
    cache.set_padding(torch.tensor([[0, 1, 1]]))
    with pytest.raises(CacheStateError, match="given for 1 rows, the model passed 2"):
        cache.layers[0].update(*states(3))


def test_an_empty_cache_takes_another_batch_and_dtype():
    cache = new_cache()
    layer = cache.layers[0]
    layer.update(*states(30))
    for empty in (cache.reset, lambda: cache.crop(-30)):
        empty()
        layer.update(*states(20, batch=3, dtype=torch.bfloat16))
        layer.store.place_waiting()
        assert layer.batch_size == 3 and layer.store.dense("k").dtype == torch.bfloat16
        cache.reset()
        layer.update(*states(30))
        layer.store.place_waiting()
        assert layer.store.dense("k").dtype == torch.float32


def test_feeding_the_same_prompt_again_warns():
    model = tiny_model("llama")
    ids, _ = prompt(1, 40)
    cache = new_cache(sink_tokens=32)
    model.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
    with pytest.warns(UserWarning, match="begin like the ones that the cache holds already"), torch.no_grad():
        model(input_ids=ids, past_key_values=cache)


@pytest.mark.parametrize("room", [{}, dict(max_cache_len=64)])
def test_generating_from_the_question_alone_says_what_is_missing(room):
    model = tiny_model("llama")
    ids, _ = prompt(1, 40)
    cache = OscarCache(model.config, recipe="hadamard", **room)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    with pytest.raises(CacheStateError, match="no token is new: the cache holds 40.*takes the whole text"):
        model.generate(ids[:, :7], past_key_values=cache, max_new_tokens=2)
    assert int(cache.get_seq_length()) == 40


def test_an_interrupted_forward_is_noticed():
    model = tiny_model("llama")
    ids, _ = prompt(1, 40)
    cache = new_cache()
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        broken = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=ids[:, :1], past_key_values=cache)
        broken.remove()
        with pytest.raises(CacheStateError, match="layer 1 holds 40 tokens where the layers before it held 41"):
            model(input_ids=ids[:, :1], past_key_values=cache)
        cache.reset()
        model(input_ids=ids, past_key_values=cache)


def test_failing_to_place_a_prompt_keeps_it(monkeypatch):
    layer = one_layer()
    keys, values = states(60)
    layer.update(keys, values)

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("oscar_hf.storage.layer_store.append_rows", fail)
        with pytest.raises(MemoryError):
            layer.store.place_waiting()
    assert layer.get_seq_length() == 60
    layer.store.place_waiting()
    assert torch.equal(layer.store.dense("k")[:, :, -8:], keys[:, :, -8:])


def test_a_deleted_cache_is_freed_at_once():
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        model = tiny_model("llama")
        cache = new_cache()
        with torch.no_grad():
            model(input_ids=prompt(1, 60)[0], past_key_values=cache)
        layer = weakref.ref(cache.layers[-1])
        del cache
        assert layer() is None
    finally:
        gc.enable()


def test_an_artifact_for_other_heads_or_another_family_is_noticed_at_construction():
    fields = dict(num_hidden_layers=3, layer_types=["full_attention"] * 3, model_type="llama")
    for wrong, message in (
        (dict(head_dim=64), "head dim 64, this model has 16"),
        (dict(num_key_value_heads=4), "KV heads 4"),
    ):
        with pytest.raises(ArtifactError, match=message):
            OscarCache(tiny_config("llama"), artifact=Artifact.data_free(**fields, **wrong))
    with pytest.warns(UserWarning, match="made for a llama model, this one is mistral"):
        OscarCache(tiny_config("mistral"), artifact=Artifact.data_free(**fields))


def test_report_says_larger_and_empty():
    cache = new_cache()
    assert "empty" in str(cache.memory_report())
    for layer in cache.layers:
        layer.update(*states(3))
    assert "x larger" in str(cache.memory_report())
