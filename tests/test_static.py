"""The static cache: the same tokens as the growing one, one graph for everything, and nothing overwritten when it is full."""

import copy

import pytest
import torch
from tiny_models import EAGER_ONLY, prompt, tiny_model
from transformers import CompileConfig, StaticCache

from oscar_hf import OscarCache, StaticOscarCache
from oscar_hf.artifact.recipes import PUBLISHED_STORAGE
from oscar_hf.errors import CacheStateError, OscarError
from oscar_hf.kernels.decode_step import OVERFLOW

SMALL = dict(sink_tokens=4, recent_tokens=8)
# Storage of a token that nothing but the token itself enters.
TOKEN_BY_TOKEN = dict(recipe="hadamard", **PUBLISHED_STORAGE)


def static(model, length=128, **options):
    return OscarCache(model.config, max_cache_len=length, **SMALL, **options)


def generate(model, ids, mask, cache, new=24, **options):
    options = {"do_sample": False, "max_new_tokens": new, "disable_compile": True, **options}
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **options)


class Counting:
    """A backend that counts graphs; `compile_config` makes generate() compile on the CPU too."""

    def __init__(self, backend):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.graphs = 0

        # A function, because generate() copies its configuration: a copied object would count for itself.
        def count(graph, examples):
            self.graphs += 1
            return torch._dynamo.lookup_backend(backend)(graph, examples)

        self.config = CompileConfig(backend=count, mode=None, fullgraph=False)
        self.config._compile_all_devices = True

    @property
    def options(self):
        """Arguments of generate()."""
        return dict(compile_config=self.config, disable_compile=False)

    @property
    def breaks(self):
        """Reasons of graph breaks so far."""
        return dict(torch._dynamo.utils.counters["graph_break"])


def test_max_cache_len_makes_a_static_cache():
    model = tiny_model("llama")
    cache = static(model)
    assert isinstance(cache, StaticOscarCache) and isinstance(cache, StaticCache) and cache.is_compileable
    assert cache.get_max_length() == 128 and cache.get_seq_length() == 0
    assert not isinstance(OscarCache(model.config, **SMALL), StaticCache)


def test_repr_only_looks():
    """A prompt that waits goes on waiting, and a step's length is a number."""
    model, (ids, mask) = tiny_model("llama"), prompt(1, 60)
    cache = static(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        waiting = [layer.store.waiting_tokens for layer in cache.oscar_layers]
        assert "60 tokens" in repr(cache) and any(waiting)
        assert [layer.store.waiting_tokens for layer in cache.oscar_layers] == waiting
        generate(model, torch.cat([ids, ids[:, :1]], 1), torch.cat([mask, mask[:, :1]], 1), cache, new=3)
    assert "63 tokens" in repr(cache) and all(layer.store.takes_steps for layer in cache.oscar_layers)


@pytest.mark.parametrize("length", [0, -1, 2.5, True, "many"])
def test_bad_lengths_are_refused(length):
    with pytest.raises(OscarError, match="positive number of tokens"):
        static(tiny_model("llama"), length)


def test_offloading_is_refused():
    with pytest.raises(OscarError, match="exclude each other"):
        static(tiny_model("llama"), offloading=True)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "mistral_sliding", "gemma2", "gemma3", "gpt_oss", "phi3", "qwen3_next"]
)
def test_same_tokens_as_the_growing_cache(family, attn):
    if family in EAGER_ONLY and attn == "sdpa":
        pytest.skip("no sdpa attention in transformers")
    model = tiny_model(family, attn)
    for pads in ((), (0, 7)):
        ids, mask = prompt(2, 50, pads)
        expected = generate(model, ids, mask, OscarCache(model.config, **SMALL))
        assert torch.equal(generate(model, ids, mask, static(model)), expected)


@pytest.mark.parametrize("family, attn, backend", [
    ("llama", "sdpa", "eager"), ("llama", "eager", "aot_eager"), ("qwen3", "sdpa", "aot_eager"), ("llama", "sdpa", "inductor"),
])  # fmt: skip
def test_one_graph_for_all_lengths_caches_and_paddings(family, attn, backend):
    model = tiny_model(family, attn)
    counting = Counting(backend)
    ids, mask = prompt(2, 50)
    expected = generate(model, ids, mask, OscarCache(model.config, **SMALL), 60)
    cache = static(model)
    # 60 steps cross the sink's, the window's and the ring's edges.
    assert torch.equal(generate(model, ids, mask, cache, 60, **counting.options), expected)
    assert counting.graphs == 1
    cache.reset()
    assert torch.equal(generate(model, ids, mask, cache, 60, **counting.options), expected)
    padded = prompt(2, 60, (0, 7))
    expected = generate(model, *padded, OscarCache(model.config, **SMALL))
    assert torch.equal(generate(model, *padded, static(model), **counting.options), expected)
    assert counting.graphs == 1 and not counting.breaks


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_next"])
def test_hybrids_compile_as_often_as_with_transformers_own_cache(family):
    model = tiny_model(family, "eager" if family in EAGER_ONLY else "sdpa")
    ids, mask = prompt(2, 50)
    theirs = Counting("eager")
    generate(model, ids, mask, StaticCache(model.config, 128), **theirs.options)
    ours = Counting("eager")
    expected = generate(model, ids, mask, OscarCache(model.config, **SMALL))
    assert torch.equal(generate(model, ids, mask, static(model), **ours.options), expected)
    assert 0 < ours.graphs == theirs.graphs and not ours.breaks


@pytest.mark.parametrize("options", [
    dict(num_beams=3), dict(do_sample=True, num_return_sequences=3, top_k=5), dict(prompt_lookup_num_tokens=4),
    dict(prefill_chunk_size=16), dict(prefill_chunk_size=24),
])  # fmt: skip
def test_decoding_modes(options):
    model = tiny_model("llama")
    batch = 1 if "prompt_lookup_num_tokens" in options else 2
    ids, mask = prompt(batch, 48)
    outputs = []
    for cache in (OscarCache(model.config, **SMALL), static(model)):
        torch.manual_seed(0)
        outputs.append(generate(model, ids, mask, cache, **options))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "options", [dict(num_beams=3), dict(prefill_chunk_size=24), dict(num_beams=2, num_return_sequences=2)]
)
def test_compiled_decoding_modes(options):
    model = tiny_model("llama")
    counting = Counting("eager")
    ids, mask = prompt(2, 48)
    expected = generate(model, ids, mask, OscarCache(model.config, **SMALL), **options)
    assert torch.equal(generate(model, ids, mask, static(model), **options, **counting.options), expected)


def test_assisted_decoding():
    """The first drafts come with the prompt, so that nothing may be learned from it."""
    model, draft = tiny_model("llama"), tiny_model("llama", seed=1, num_hidden_layers=1)
    ids, mask = prompt(1, 40)
    expected = generate(model, ids, mask, OscarCache(model.config, **SMALL, **TOKEN_BY_TOKEN))
    got = generate(model, ids, mask, static(model, **TOKEN_BY_TOKEN), assistant_model=draft)
    assert torch.equal(got, expected)


def test_turns_of_a_chat():
    model = tiny_model("llama")
    caches = [OscarCache(model.config, **SMALL), static(model, 256)]
    texts = [prompt(2, 30)[0], prompt(2, 30)[0]]
    for turn, more in enumerate((5, 20, 40, 3)):
        for i, cache in enumerate(caches):
            ids = torch.cat([texts[i], prompt(2, more, seed=turn)[0]], 1)
            texts[i] = generate(model, ids, torch.ones_like(ids), cache, 10)
        assert torch.equal(*texts)


def test_crop_then_go_on():
    model = tiny_model("llama")
    ids = prompt(1, 60)[0]
    caches = [OscarCache(model.config, **SMALL), static(model)]
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :45], past_key_values=cache)
            for i in range(45, 55):
                model(ids[:, i : i + 1], past_key_values=cache)
        for remove in (0, 3, 12, 30):
            logits = []
            for cache in caches:
                cache.crop(-remove)
                logits.append([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(5)])
            assert int(caches[0].get_seq_length()) == int(caches[1].get_seq_length())
            torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
        for cache in caches:
            cache.crop(-1000)
        assert caches[1].get_seq_length() == 0
        logits = [model(ids[:, :20], past_key_values=cache).logits for cache in caches]
        torch.testing.assert_close(*logits)


def test_batch_operations_keep_the_buffers_in_place():
    model = tiny_model("llama")
    ids, mask = prompt(3, 50, (0, 7, 20))
    caches = [OscarCache(model.config, **SMALL), static(model)]
    with torch.no_grad():
        for cache in caches:
            model(ids, attention_mask=mask, past_key_values=cache)
        where = caches[1].layers[0].store.storage.data_ptr()
        for cache in caches:
            cache.reorder_cache(torch.tensor([2, 0, 0]))
        assert where == caches[1].layers[0].store.storage.data_ptr()
        mask = torch.cat([mask[[2, 0, 0]], torch.ones(3, 1, dtype=mask.dtype)], 1)
        step = [model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits for cache in caches]
        torch.testing.assert_close(*step, atol=1e-4, rtol=1e-4)
        for cache in caches:
            cache.batch_select_indices(torch.tensor([0, 2]))
            cache.batch_repeat_interleave(2)
        mask = torch.cat([mask[[0, 0, 2, 2]], torch.ones(4, 1, dtype=mask.dtype)], 1)
        step = [model(ids[:1, :1].expand(4, 1), attention_mask=mask, past_key_values=cache).logits for cache in caches]
        torch.testing.assert_close(*step, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_shared_keys_are_exact_during_their_call(family):
    """Later layers read the keys and values of earlier ones in the same forward, in every turn (HOUSE 1.1)."""
    model = tiny_model(family).double()
    ids = prompt(1, 260)[0]
    caches = [OscarCache(model.config, **SMALL), static(model, 300)]
    at = 0
    with torch.no_grad():
        for count in (50, 70, 1, 20, 1, 1, 90):
            growing, fixed = (model(ids[:, at : at + count], past_key_values=cache).logits for cache in caches)
            # Some norms of these models are float32 in any case.
            torch.testing.assert_close(fixed, growing, atol=1e-5, rtol=1e-5)
            at += count


def test_a_prompt_waits_for_the_device_at_most_three_times_a_layer(monkeypatch):
    """Lengths on the device are read as a snapshot, not one by one (HOUSE 1.4)."""
    model = tiny_model("llama", num_hidden_layers=2)
    cache, ids = static(model, 512), prompt(1, 300)[0]
    reads = []

    def watch(name):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *args: reads.append(name) or original(*args))

    for name in ("__int__", "__bool__", "__index__", "__float__", "item", "tolist", "cpu"):
        watch(name)
    at, seen = 0, {}
    with torch.no_grad():
        for name, count in (("prompt", 60), ("steps", 1), ("turn", 70), ("short turn", 20), ("steps", 2), ("turn", 90)):
            reads.clear()
            model(ids[:, at : at + count], past_key_values=cache)
            seen[name] = max(len(reads), seen.get(name, 0))
            at += count
    assert max(seen["prompt"], seen["turn"], seen["short turn"]) <= 3 * 2, seen


def test_static_caches_are_made_explicitly():
    """By keyword, by class, by subclass; never half of one (HOUSE 1.3)."""
    config = tiny_model("llama").config
    with pytest.raises(TypeError, match="positional"):
        OscarCache(config, None, "hadamard", 128)
    with pytest.raises(OscarError, match="StaticOscarCache has a fixed size: pass max_cache_len"):
        StaticOscarCache(config, recipe="hadamard")
    assert type(OscarCache(config, max_cache_len=128, **SMALL)) is StaticOscarCache
    assert type(StaticOscarCache(config, max_cache_len=128, **SMALL)) is StaticOscarCache

    class Growing(OscarCache):
        pass

    class Fixed(StaticOscarCache):
        pass

    assert not Growing(config, **SMALL).is_compileable
    fixed = Fixed(config, max_cache_len=128, **SMALL)
    assert isinstance(fixed, StaticCache) and fixed.is_compileable
    fixed.check_overflow()
    with pytest.raises(
        OscarError, match="Growing derives from OscarCache, which grows: derive it from StaticOscarCache"
    ):
        Growing(config, max_cache_len=128, **SMALL)


@pytest.mark.parametrize("storage", [{}, TOKEN_BY_TOKEN], ids=["learned", "given"])
def test_copies_are_independent_and_share_constants(storage):
    """Constants that a static cache learned are in buffers of its own, which it may learn anew."""
    model = tiny_model("llama")
    ids = prompt(1, 50)[0]
    cache = static(model, **storage)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        twin = copy.deepcopy(cache)
        ours, theirs = (each.layers[0].constants for each in (twin, cache))
        assert (ours is theirs) == bool(storage)
        for name, tensor in theirs.tensors().items():
            assert torch.equal(ours.tensors()[name], tensor)
            assert storage or ours.tensors()[name].data_ptr() != tensor.data_ptr()
        first = model(ids[:, :1], past_key_values=cache).logits
        assert int(cache.get_seq_length()) == 51 and int(twin.get_seq_length()) == 50
        assert torch.equal(model(ids[:, :1], past_key_values=twin).logits, first)


def test_what_does_not_fit_is_refused_before_anything_is_overwritten():
    model = tiny_model("llama")
    ids = prompt(1, 60)[0]
    with torch.no_grad():
        with pytest.raises(CacheStateError, match="max_cache_len=40 tokens, holds 0 and was given 60"):
            model(ids, past_key_values=static(model, 40))
        cache = static(model, 61)
        model(ids, past_key_values=cache)
        expected = copy.deepcopy(cache)
        model(ids[:, :1], past_key_values=cache)
        model(ids[:, :1], past_key_values=expected)
        with pytest.raises(CacheStateError, match="max_cache_len=61 tokens, holds 61"):
            model(ids[:, :1], past_key_values=cache)
        for new, old in zip(cache.layers[0].store.regions.tensors(), expected.layers[0].store.regions.tensors()):
            assert torch.equal(new, old)


@pytest.mark.parametrize("static", [False, True])
def test_a_step_of_another_batch_or_model_is_refused(static):
    """One row, or one KV head, would be broadcast over all that are stored."""
    model, ids = tiny_model("llama"), prompt(2, 50)[0]
    cache = OscarCache(model.config, max_cache_len=128 if static else None, **SMALL)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for other, rows in ((model, ids[:1, :1]), (tiny_model("llama", num_key_value_heads=1), ids[:, :1])):
            with pytest.raises(CacheStateError, match=r"holds (2 rows|\(batch, KV heads, .*\) = \(2, 2, 16, 16\))"):
                other(rows, past_key_values=cache)
        assert int(cache.get_seq_length()) == 50


def test_a_mask_of_the_tokens_held_alone_is_refused_at_a_step():
    model, ids = tiny_model("llama"), prompt(1, 50)[0]
    cache = static(model)
    mask = torch.ones(1, 1, 1, cache.get_mask_sizes(1, 0)[0] + 50, dtype=torch.bool)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(CacheStateError, match=r"mask over max_cache_len=128 slots, got \[1, 1, 1, 51\]"):
            model(ids[:, :1], attention_mask=mask, past_key_values=cache)


def test_made_in_inference_mode_used_outside():
    model, ids = tiny_model("llama"), prompt(1, 50)[0]
    with torch.inference_mode():
        cache = static(model)
    cache.reset()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        step = model(ids[:, :1], past_key_values=cache)
    assert torch.isfinite(step.logits).all() and int(cache.get_seq_length()) == 51


def test_early_initialization():
    model = tiny_model("llama")
    cache = static(model)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    ids, mask = prompt(2, 50)
    assert torch.equal(generate(model, ids, mask, cache), generate(model, ids, mask, OscarCache(model.config, **SMALL)))


def test_gradients_reach_the_tokens_of_the_call():
    model = tiny_model("llama")
    ids = prompt(1, 50)[0]
    grads = []
    for cache in (OscarCache(model.config, **SMALL), static(model)):
        with torch.no_grad():
            model(ids, past_key_values=cache)
        model.zero_grad()
        model(ids[:, :2], past_key_values=cache).logits.square().sum().backward()
        grads.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(*grads, atol=1e-3, rtol=1e-3)


def same_up_to_ties(expected, got, tie=1e-2):
    """Both generate() outputs have the same tokens, or part at a step whose two best logits are as good as equal."""
    parted = (expected.sequences != got.sequences).any(0).nonzero()
    if not len(parted):
        return True
    step = int(parted[0]) - (expected.sequences.shape[1] - len(expected.logits))
    rows = expected.sequences[:, parted[0, 0]] != got.sequences[:, parted[0, 0]]
    best = expected.logits[step][rows].float().topk(2, -1).values
    return bool((best[:, 0] - best[:, 1] < tie * best[:, 0].abs()).all())


@pytest.mark.gpu
@pytest.mark.parametrize("family, attn", [("qwen3", "sdpa"), ("qwen3", "eager"), ("gemma3", "sdpa"), ("phi3", "sdpa")])
def test_cuda_graphs(family, attn):
    """generate() compiles by itself; 400 steps cross every edge; a reset, a second and a padded cache add no graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model(family, attn).to("cuda")
    options = dict(output_logits=True, return_dict_in_generate=True)
    ids, mask = (x.to("cuda") for x in prompt(2, 50))
    expected = generate(model, ids, mask, static(model, 512), 400, **options)
    cache = static(model, 512)
    first = generate(model, ids, mask, cache, 400, disable_compile=False, **options)
    stats = torch._dynamo.utils.counters["stats"]
    graphs = stats["unique_graphs"]
    assert graphs == (2 if family == "gemma3" else 1) and not torch._dynamo.utils.counters["graph_break"]
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert same_up_to_ties(expected, first)
    cache.reset()
    again = generate(model, ids, mask, cache, 400, disable_compile=False, **options)
    assert torch.equal(again.sequences, first.sequences)
    padded = [x.to("cuda") for x in prompt(2, 60, (0, 7))]
    expected = generate(model, *padded, static(model, 512), 100, **options)
    assert same_up_to_ties(
        expected, generate(model, *padded, static(model, 512), 100, disable_compile=False, **options)
    )
    assert stats["unique_graphs"] == graphs and not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.gpu
@pytest.mark.parametrize("pads", [(), (0, 7)])
@pytest.mark.parametrize(
    "family, dtype", [("qwen3", torch.bfloat16), ("qwen3", torch.float16), ("phi3", torch.bfloat16)]
)
def test_gpu_steps_give_the_logits_of_the_growing_cache(family, dtype, pads):
    """Token by token on the same text, so that no difference can add up: what kernels, masks and lengths are worth.

    The yardstick is the same model in float32: the static cache may not be further from it than the growing one.
    """
    model = tiny_model(family).to("cuda", dtype)
    exact = tiny_model(family).to("cuda", dtype).float()
    ids, mask = (x.to("cuda") for x in prompt(2, 90, pads))
    logits = []
    with torch.no_grad():
        for net, cache in (
            (exact, OscarCache(model.config, **SMALL)),
            (model, OscarCache(model.config, **SMALL)),
            (model, static(model, 512)),
        ):
            rows = [net(ids[:, :50], attention_mask=mask[:, :50], past_key_values=cache).logits[:, -1]]
            for i in range(50, 90):
                step = net(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache)
                rows.append(step.logits[:, -1])
            logits.append(torch.stack(rows).float())
    growing, fixed = ((x - logits[0]).norm(dim=-1) / logits[0].norm(dim=-1) for x in logits[1:])
    assert fixed.median() < 1.3 * growing.median() and fixed.max() < 1.3 * growing.max()


@pytest.mark.parametrize("look", ["crop", "prompt", "save_pretrained", "memory_report", "iteration"])
def test_a_step_that_did_not_fit_is_told_once_and_for_all_layers(look, tmp_path):
    """What a compiled step leaves on a GPU when it does not fit: a flag in every layer, nothing stored."""
    model = tiny_model("qwen3")
    cache, ids = static(model, 64), prompt(1, 40)[0]
    with torch.no_grad():
        model(ids, past_key_values=cache)
    for layer in cache.oscar_layers:
        layer.store.counters[OVERFLOW] = 1
    looks = {
        "crop": lambda: cache.crop(-5),
        "prompt": lambda: model(ids[:, :20], past_key_values=cache),
        "save_pretrained": lambda: cache.save_pretrained(tmp_path / "cache"),
        "memory_report": cache.memory_report,
        "iteration": lambda: list(cache),
    }
    with (
        torch.no_grad(),
        pytest.raises(CacheStateError, match="holds 40 and was given some more, which were not stored"),
    ):
        looks[look]()
    assert [layer.store.held for layer in cache.oscar_layers] == [40] * 3
    with torch.no_grad():
        looks[look]()
    assert len({layer.store.held for layer in cache.oscar_layers}) == 1
