"""register_attention: packed attention for sdpa and for functions with flash attention's masks, everything else untouched."""

import warnings

import pytest
import torch
from tiny_models import prompt, tiny_config, tiny_model
from transformers import AttentionInterface, CompileConfig, DynamicCache

from oscar_hf import OscarCache, OscarError
from oscar_hf.attention import flash as registry
from oscar_hf.attention import kv_handle as handle
from oscar_hf.attention.flash import NAMES, register_attention
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT

WINDOWS = dict(sink_tokens=4, recent_tokens=8)
FLASH = "flash_attention_2"


class FakeFlash:
    """Flash attention's interface in plain PyTorch: masks [B, T] or None, causality implied and bottom-right."""

    def __init__(self):
        self.calls, self.arguments = 0, []

    def __call__(
        self, module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
        is_causal=None, **kwargs,
    ):  # fmt: skip
        self.calls += 1
        self.arguments.append(dict(sliding_window=sliding_window, softcap=softcap, **kwargs))
        # Its first operation on keys and values, after which flash attention must have real tensors.
        key, value = key.transpose(1, 2).transpose(1, 2), value.transpose(1, 2).transpose(1, 2)
        assert type(key) is torch.Tensor and type(value) is torch.Tensor
        if attention_mask is not None:
            # Of a fixed-size cache only what the mask covers is there.
            key, value = key[:, :, : attention_mask.shape[1]], value[:, :, : attention_mask.shape[1]]
        new, total = query.shape[2], key.shape[2]
        slots = torch.arange(total)
        own = torch.arange(total - new, total)[:, None]
        seen = slots <= own
        if sliding_window is not None:
            seen = seen & (slots > own - sliding_window)
        seen = seen[None, None]
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        group = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(group, 1).mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


@pytest.fixture
def flash():
    """A fake flash attention in transformers' registry, and whatever stood there afterwards."""
    before = dict(AttentionInterface())
    fake = FakeFlash()
    AttentionInterface.register(FLASH, fake)
    handle._warned.clear()
    yield fake
    registry._unregister()
    for name in set(AttentionInterface()):
        if name in before:
            AttentionInterface.register(name, before[name])
        else:
            del AttentionInterface._global_mapping[name]


def model_with(attn, family="llama"):
    """A tiny model whose config names an attention function, without the checks for what is installed."""
    model = tiny_model(family)
    model.config._attn_implementation = attn
    assert model.config._attn_implementation == attn
    return model


def generate(model, ids, mask, cache, new=12, **options):
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **{CACHE_ARGUMENT: cache}, **options,
    )  # fmt: skip


def options(model):
    """Storage of the caches that are compared. Unwrapped flash attention shows no queries, from which a wrapped one learns."""
    learned = {} if model.config._attn_implementation == "sdpa" else dict(recipe="hadamard", key_scale="search")
    return {**WINDOWS, **learned}


def oscar(model, mask=None):
    cache = OscarCache(model.config, **options(model))
    if mask is not None:
        cache.set_padding(mask)
    return cache


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("pads", [(), (0, 13)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("attn", ["sdpa", FLASH])
def test_generation_equals_the_unwrapped_one(flash, family, pads, attn):
    model = model_with(attn, family)
    ids, mask = prompt(2, 40, pads)
    with warnings.catch_warnings():
        # Unwrapped flash attention gets dense tensors, with a warning.
        warnings.simplefilter("ignore")
        expected = generate(model, ids, mask, oscar(model, mask))
    unwrapped_calls, flash.calls = flash.calls, 0
    register_attention()
    cache = oscar(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = generate(model, ids, mask, cache)
    assert torch.equal(got.sequences, expected.sequences)
    for a, b in zip(got.logits, expected.logits):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    for layer in cache.oscar_layers:
        assert layer.store.history == 40 + 11 - 4 - 8
        assert layer.store.padding.rows == ([0, 13] if pads else [])
    if attn == FLASH:
        layers = model.config.num_hidden_layers
        assert unwrapped_calls == 12 * layers and flash.calls == layers, "only the prompt belongs to flash attention"


@pytest.mark.parametrize("pads", [(), (0, 13)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("attn", ["sdpa", FLASH])
def test_turns_and_drafts_equal_the_unwrapped_ones(flash, pads, attn):
    model = model_with(attn)
    ids, mask = prompt(2, 150, pads)
    mask = mask if pads else None

    def logits(cache):
        out = []
        with torch.no_grad():
            for begin, end in ((0, 60), (60, 61), (61, 120), (120, 124), (124, 150)):
                part = None if mask is None else mask[:, :end]
                arguments = {"attention_mask": part, CACHE_ARGUMENT: cache}
                out.append(model(input_ids=ids[:, begin:end], **arguments).logits)
        return torch.cat(out, 1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = logits(oscar(model, mask))
    register_attention()
    got = logits(oscar(model))
    real = torch.ones(2, 150, dtype=torch.bool) if mask is None else mask.bool()
    # A value on the edge of two codes may fall to either side, by the order in which a machine adds: that is felt, but little.
    difference = (got[real] - expected[real]).norm(dim=-1) / expected[real].norm(dim=-1)
    assert difference.median() < 1e-5 and difference.max() < 2e-3


@pytest.mark.parametrize("pads", [(), (0, 13)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("attn, graphs", [("sdpa", 1), (FLASH, 2)])
def test_compiled_decode_of_a_static_cache(flash, attn, graphs, pads):
    model = model_with(attn)
    ids, mask = prompt(2, 40, pads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = generate(model, ids, mask, oscar(model, mask))
    register_attention()
    flash.calls, captured = 0, []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = CompileConfig(backend=lambda graph, examples: captured.append(graph) or graph, mode=None, fullgraph=False)
    config._compile_all_devices = True
    cache = OscarCache(model.config, max_cache_len=64, **options(model))
    got = generate(model, ids, mask, cache, compile_config=config)
    assert torch.equal(got.sequences, expected.sequences)
    # Flash attention's masks grow, so its second step may be compiled once more, for all lengths.
    assert 1 <= len(captured) <= graphs and not torch._dynamo.utils.counters["graph_break"]
    assert flash.calls == (model.config.num_hidden_layers if attn == FLASH else 0)


@pytest.mark.parametrize("family", ["mistral_sliding", "gemma3", "gemma3n"])
@pytest.mark.parametrize("attn", ["sdpa", FLASH])
def test_models_with_sliding_layers(flash, family, attn):
    model = model_with(attn, family)
    ids, mask = prompt(2, 40, (0, 13))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = generate(model, ids, mask, oscar(model, mask))
        register_attention()
        got = generate(model, ids, mask, oscar(model))
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.logits[-1], expected.logits[-1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("attn", ["sdpa", FLASH])
def test_other_caches_pass_through(flash, attn):
    model = model_with(attn)
    ids, mask = prompt(2, 30, (0, 7))
    expected = generate(model, ids, mask, DynamicCache(config=model.config))
    register_attention()
    got = generate(model, ids, mask, DynamicCache(config=model.config))
    assert torch.equal(got.sequences, expected.sequences) and torch.equal(got.logits[-1], expected.logits[-1])


@pytest.fixture
def states():
    """A query, handles over 61 tokens, and a module to pass along."""
    layer = OscarCache(tiny_config("llama"), **WINDOWS).layers[0]
    layer.update(torch.randn(2, 2, 60, 16), torch.randn(2, 2, 60, 16))
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    return module, torch.randn(2, 4, 1, 16), *layer.update(torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16))


@pytest.mark.filterwarnings("ignore:oscar_hf")
@pytest.mark.parametrize("option", [dict(softcap=5.0), dict(sliding_window=20), dict(s_aux=torch.zeros(4))])
def test_what_packed_attention_does_not_know_goes_to_the_original(flash, states, option):
    module, query, keys, values = states
    expected = flash(module, query, keys, values, None, **option)[0]
    calls = flash.calls
    register_attention()
    got = AttentionInterface()[FLASH](module, query, keys, values, None, **option)[0]
    assert flash.calls == calls + 1 and torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore:oscar_hf")
def test_gradients_go_to_the_original(flash, states):
    module, query, keys, values = states
    register_attention()
    AttentionInterface()[FLASH](module, query.requires_grad_(), keys, values, None)[0].sum().backward()
    assert flash.calls == 1 and query.grad is not None
    with torch.no_grad():
        AttentionInterface()[FLASH](module, query, keys, values, None)
    assert flash.calls == 1


def test_a_mask_of_a_fixed_size_cache_ends_at_its_last_token():
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, 0] = 0
    expanded = registry._expanded(mask, 2, 8, True)
    assert expanded.shape == (2, 1, 2, 8)
    assert expanded[:, 0].long().tolist() == [
        [[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]],
        [[0, 1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0]],
    ]
    assert registry._expanded(mask, 1, 5, False).shape == (2, 1, 1, 5)
    assert registry._flash_mask(None, None, 3, 8, True) == (None, True)
    assert registry._flash_mask(None, None, 1, 8, True) == (None, False)


def test_registering_twice_and_undoing_restores_exactly(flash):
    before = dict(AttentionInterface())
    undo = register_attention()
    during = dict(AttentionInterface())
    changed = {name for name in before if during[name] is not before[name]}
    assert changed == set(NAMES) & set(before) and "eager" not in changed
    again = register_attention()
    assert dict(AttentionInterface()) == during
    again()
    assert dict(AttentionInterface()) == before
    undo()
    assert dict(AttentionInterface()) == before


def test_undo_leaves_what_somebody_else_registered_since(flash):
    undo = register_attention()
    theirs = FakeFlash()
    AttentionInterface.register(FLASH, theirs)
    undo()
    assert AttentionInterface()[FLASH] is theirs


def test_other_names(flash):
    AttentionInterface.register("somebody/flash-attn", flash)
    with pytest.raises(OscarError, match=r"no attention named \['not there'\]"):
        register_attention(["somebody/flash-attn", "not there"])
    assert AttentionInterface()["somebody/flash-attn"] is flash
    register_attention("somebody/flash-attn")
    assert AttentionInterface()["somebody/flash-attn"] is not flash
    with pytest.raises(OscarError, match="eager"):
        register_attention(["eager"])
