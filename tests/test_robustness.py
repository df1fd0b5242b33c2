"""Uses of a cache that go beyond one greedy generate(): every decoding mode, foreign attention code, random operations."""

import contextlib
import copy
import random

import pytest
import torch
import torch.nn.functional as F
import transformers
from dense_cache import DenseCache
from tiny_models import prompt, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import flash_attention_mask

from oscar_hf import ArtifactError, CacheStateError, OscarCache, UnsupportedModelError
from oscar_hf.storage.layer_store import LayerStore
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT

WINDOWS = dict(sink_tokens=4, recent_tokens=8)
BEAMS, SAMPLES = dict(num_beams=3, num_return_sequences=2), dict(do_sample=True, num_return_sequences=3, top_k=5)
LOOKUP = dict(prompt_lookup_num_tokens=5, eos_token_id=95)

# name -> (batch of the prompt, rows per prompt while generating, arguments of generate)
MODES = {
    "sampling": (2, 3, SAMPLES),
    "beams": (2, 3, BEAMS),
    "assisted": (1, 1, dict(draft=True)),
    "early exit": (1, 1, dict(assistant_early_exit=1)),
    "prompt lookup": (1, 1, LOOKUP),
    "long drafts": (1, 1, dict(LOOKUP, prompt_lookup_num_tokens=45)),
    "chunked prefill": (2, 1, dict(prefill_chunk_size=7)),
    "processors": (2, 1, dict(repetition_penalty=1.3, no_repeat_ngram_size=2)),
}


def new_cache(model, kind=OscarCache, **fields):
    return kind(model.config, **fields)


def generate(model, ids, mask, cache, draft=False, **options):
    torch.manual_seed(0)
    if draft:
        options["assistant_model"] = tiny_model("llama", num_hidden_layers=1)
    options = {"max_new_tokens": 14, "do_sample": False, CACHE_ARGUMENT: cache, **options}
    return model.generate(ids, attention_mask=mask, **options)


@torch.no_grad()
def forward(model, cache, ids, mask=None):
    positions = {}
    if mask is not None:
        positions = dict(position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :])
    return model(input_ids=ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **positions).logits


def flash_like(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Does to keys and values what transformers' flash attention does, and takes nothing but real tensors."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    assert type(key) is type(value) is torch.Tensor
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    new, total = query.shape[2], key.shape[2]
    mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)[None, None]
    if attention_mask is not None:
        mask = mask & attention_mask[:, None, None, :total].bool()
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return output.nan_to_num().transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", MODES)
def test_decoding_modes(mode, attn):
    """Equal to DynamicCache while all is in the windows, and to the dense twin beyond."""
    batch, rows, options = MODES[mode]
    model = tiny_model("llama", attn)
    ids, mask = prompt(batch, 60, (0, 13)[:batch])
    if "prompt_lookup_num_tokens" in options:
        ids = prompt(1, 12)[0].repeat(1, 5)
    handles, dense = new_cache(model, **WINDOWS), new_cache(model, kind=DenseCache, **WINDOWS)
    dense.set_padding(mask.repeat_interleave(rows, 0))
    assert torch.equal(generate(model, ids, mask, handles, **options), generate(model, ids, mask, dense, **options))
    assert handles.layers[0].store.history > 0
    ids, mask = ids[:, :20], mask[:, :20]
    dynamic = DynamicCache(config=model.config)
    assert torch.equal(
        generate(model, ids, mask, new_cache(model), **options), generate(model, ids, mask, dynamic, **options)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_prompt_of_one_token(attn, dtype):
    model = tiny_model("llama", attn).to(dtype)
    ids, mask = prompt(1, 1)
    dynamic = DynamicCache(config=model.config)
    assert torch.equal(generate(model, ids, mask, new_cache(model)), generate(model, ids, mask, dynamic))


@pytest.mark.filterwarnings("ignore:oscar_hf")
@pytest.mark.parametrize("pads", [(), (0, 13)], ids=["unpadded", "padded"])
def test_attention_code_that_wants_real_tensors(pads):
    AttentionInterface.register("wants_tensors", flash_like)
    AttentionMaskInterface.register("wants_tensors", flash_attention_mask)
    model = tiny_model("llama")
    model.set_attn_implementation("wants_tensors")
    ids, mask = prompt(2, 60, pads)
    handles, dense = new_cache(model, **WINDOWS), new_cache(model, kind=DenseCache, **WINDOWS)
    # Nothing shows such code's queries to a cache.
    dense.is_plain = True
    for cache in (handles, dense):
        cache.set_padding(mask)
    assert torch.equal(generate(model, ids, mask, handles), generate(model, ids, mask, dense))
    dynamic = DynamicCache(config=model.config)
    assert torch.equal(generate(model, ids, mask, new_cache(model)), generate(model, ids, mask, dynamic))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("windows", [(0, 1), (0, 8), (1, 1), (100, 1)])
def test_the_smallest_and_odd_windows(windows, attn):
    model = tiny_model("llama", attn)
    ids, mask = prompt(2, 60, (0, 13))
    fields = dict(sink_tokens=windows[0], recent_tokens=windows[1])
    handles, dense = new_cache(model, **fields), new_cache(model, kind=DenseCache, **fields)
    dense.set_padding(mask)
    assert torch.equal(generate(model, ids, mask, handles), generate(model, ids, mask, dense))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("heads", [(5, 1), (7, 1), (12, 2), (6, 3), (4, 4)])
def test_head_groups_of_any_size(heads, attn):
    model = tiny_model(
        "llama", attn, hidden_size=16 * heads[0], num_attention_heads=heads[0], num_key_value_heads=heads[1]
    )
    handles, dense = new_cache(model, **WINDOWS), new_cache(model, kind=DenseCache, **WINDOWS)
    ids, _ = prompt(2, 60)
    for piece in (ids, ids[:, :1], ids[:, :3]):
        torch.testing.assert_close(forward(model, handles, piece), forward(model, dense, piece), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("hidden", [slice(20, 30), slice(0, 30), slice(4, 9)], ids=["right", "all", "hole"])
def test_odd_padding_is_exact_in_the_windows(hidden, attn):
    """Right padding, a row of nothing but padding, and a hole in the middle of a row."""
    model = tiny_model("llama", attn)
    ids, mask = prompt(2, 30)
    mask[1, hidden] = 0
    ours, dynamic = new_cache(model), DynamicCache(config=model.config)
    forward(model, ours, ids, mask), forward(model, dynamic, ids, mask)
    for step in range(6):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        got, expected = (forward(model, cache, ids[:, step : step + 1], mask) for cache in (ours, dynamic))
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_keep_both_kinds_of_cache_equal(seed):
    """Calls of 1 to 40 tokens, crops, reorders, selections, repetitions and copies in random order."""
    rng = random.Random(seed)
    # One layer: its keys do not depend on attention, so rounding cannot tip a code.
    fields = dict(num_key_value_heads=rng.choice([1, 2, 4]), head_dim=rng.choice([16, 64]), num_hidden_layers=1)
    model = tiny_model("llama", rng.choice(["sdpa", "eager"]), **fields)
    rows, length = rng.choice([1, 2, 3]), rng.choice([5, 30, 70])
    pads = tuple(rng.choice([0, rng.randrange(length)]) for _ in range(rows))
    ids, mask = prompt(rows, length, pads, seed)
    windows = dict(sink_tokens=rng.choice([0, 1, 4, 20]), recent_tokens=rng.choice([1, 3, 8, 33]))
    caches = [new_cache(model, **windows), new_cache(model, kind=DenseCache, **windows)]
    caches[1].set_padding(mask)
    for cache in caches:
        forward(model, cache, ids, mask)
    for step in range(20):
        operation, rows = rng.choice(["call", "call", "call", "crop", "reorder", "repeat", "copy"]), len(mask)
        if operation == "call":
            ids = prompt(rows, rng.choice([1, 1, 1, 7, 40]), seed=step)[0]
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            got, expected = (forward(model, cache, ids, mask) for cache in caches)
            torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
        elif operation == "crop" and (most := min(mask.shape[1] - max(pads), 60)) > 1:
            count = rng.randrange(1, most)
            mask = mask[:, :-count]
            for cache in caches:
                cache.crop(-count)
        elif operation == "reorder":
            index = torch.tensor([rng.randrange(rows) for _ in range(rng.choice([1, rows]))])
            mask = mask[index]
            for cache in caches:
                cache.batch_select_indices(index)
        elif operation == "repeat" and rows < 4:
            mask = mask.repeat_interleave(2, 0)
            for cache in caches:
                cache.batch_repeat_interleave(2)
        elif operation == "copy":
            caches = copy.deepcopy(caches)
        assert [cache.get_seq_length() for cache in caches] == [mask.shape[1]] * 2


@pytest.mark.parametrize("at", ["copy", "reset"])
def test_copy_and_reset_while_a_prompt_is_waiting(at):
    model = tiny_model("llama")
    ids, mask = prompt(2, 60, (0, 13))
    cache, fresh = new_cache(model, **WINDOWS), new_cache(model, **WINDOWS)
    forward(model, cache, ids[:, :40])
    assert any(layer.store.waiting is not None for layer in cache.oscar_layers)
    if at == "copy":
        forward(model, fresh, ids[:, :40])
        cache = copy.deepcopy(cache)
    else:
        cache.reset()
        forward(model, cache, ids, mask)
        forward(model, fresh, ids, mask)
    got, expected = (forward(model, each, ids[:, :1]) for each in (cache, fresh))
    assert torch.equal(got, expected)


def test_vision_language_model():
    text = dict(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=24, eos_token_id=None, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )  # fmt: skip
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, image_token_index=95, mm_tokens_per_image=4, eos_token_id=None
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    ids, mask = prompt(2, 60, (0, 13))
    ids = ids.clamp(max=90)
    handles, dense = new_cache(model, **WINDOWS), new_cache(model, kind=DenseCache, **WINDOWS)
    dense.set_padding(mask)
    assert torch.equal(generate(model, ids, mask, handles), generate(model, ids, mask, dense))


def test_a_model_of_another_geometry_is_refused():
    ids, _ = prompt(1, 30)
    for fields, error in (
        (dict(num_hidden_layers=4), ArtifactError),
        (dict(num_key_value_heads=4), CacheStateError),
        (dict(head_dim=32), CacheStateError),
    ):
        model = tiny_model("llama")
        cache = new_cache(model)
        forward(model, cache, ids)
        with pytest.raises(error):
            forward(tiny_model("llama", **fields), cache, ids)
    with pytest.raises(UnsupportedModelError, match="floating"):
        integers = torch.zeros(1, 2, 3, 16, dtype=torch.int8)
        new_cache(model).update(integers, integers, 0)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_gradients_of_a_first_call_are_those_of_a_plain_cache(attn):
    model = tiny_model("llama", attn).train()
    ids, _ = prompt(1, 60)
    gradients = []
    for cache in (new_cache(model, **WINDOWS), DynamicCache(config=model.config)):
        model.zero_grad()
        model(input_ids=ids, labels=ids, **{CACHE_ARGUMENT: cache}).loss.backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    assert torch.equal(*gradients)


@pytest.mark.parametrize("static", [False, True])
def test_a_copy_made_in_inference_mode_goes_on_outside(static):
    model, ids = tiny_model("llama"), prompt(1, 50)[0]
    cache = OscarCache(model.config, max_cache_len=128 if static else None)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        twin = copy.deepcopy(cache)
    with torch.no_grad():
        steps = [model(ids[:, :1], past_key_values=c).logits for c in (cache, twin)]
    assert torch.equal(*steps)


@pytest.mark.parametrize("static", [False, True])
def test_a_failed_allocation_leaves_an_empty_cache_usable(static, monkeypatch):
    model = tiny_model("llama")
    cache = new_cache(model, **WINDOWS, max_cache_len=128 if static else None)
    small, large = prompt(1, 40)[0], prompt(4, 40)[0]
    expected = forward(model, cache, small)
    cache.reset()

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr("oscar_hf.storage.layer_store.torch.zeros", fail)
        with pytest.raises(torch.OutOfMemoryError):
            forward(model, cache, large)
    assert torch.equal(forward(model, cache, small), expected)
    cache.reset()
    assert forward(model, cache, large).shape[0] == 4


def test_a_prompt_is_placed_by_a_second_try_wherever_memory_ran_out(monkeypatch):
    """Values of another dtype, as under autocast, are converted on their way into the windows."""
    config, convert = OscarCache(tiny_model("llama").config, recipe="hadamard", **WINDOWS).oscar_config, torch.Tensor.to
    states = torch.randn(2, 1, 2, 110, 16, generator=torch.Generator().manual_seed(0))
    keys, values = states[0], states[1].bfloat16()
    constants = OscarCache(tiny_model("llama").config, recipe="hadamard").artifact.constants_for(0, keys, values)

    def waiting_store():
        store = LayerStore(config)
        store.allocate(keys, values, constants)
        for part in (slice(0, 60), slice(60, 110)):
            store.place_waiting()
            store.add(keys[:, :, part], values[:, :, part], store)
        return store

    untroubled = waiting_store()
    untroubled.place_waiting()
    for failing in range(20):
        store, seen = waiting_store(), 0

        def fail(tensor, *args, at=failing, **kwargs):
            nonlocal seen
            if tensor.dtype == torch.bfloat16 and torch.float32 in args:
                seen += 1
                if seen == at + 1:
                    raise torch.OutOfMemoryError
            return convert(tensor, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", fail)
            with contextlib.suppress(torch.OutOfMemoryError):
                store.place_waiting()
        store.place_waiting()
        assert all(torch.equal(store.dense(kind), untroubled.dense(kind)) for kind in "kv")
        if seen <= failing:
            break
    assert failing > 0
