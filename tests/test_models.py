"""Generation through the handles equals generation with a cache whose update() returns the same dense tensors: windows,
turns and paddings, on few models; test_families.py has them all."""

import pytest
import torch
from dense_cache import DenseCache
from helpers import calibrated_artifact
from tiny_models import prompt, tiny_config, tiny_model

from oscar_hf import OscarCache
from oscar_hf.artifact.recipes import PUBLISHED_STORAGE
from oscar_hf.cache.layer import OscarLayer

WINDOWS = dict(sink_tokens=4, recent_tokens=8)
CALIBRATED = dict(artifact=calibrated_artifact())
# What a row is stored as then does not depend on the rows beside it: no block of keys and nothing learned.
ROW_BY_ROW = dict(recipe="hadamard", **PUBLISHED_STORAGE)


def caches(config, mask, **options):
    """A cache that returns handles, and its twin that returns dense tensors and is told the padding."""
    handles, dense = OscarCache(config, **options), DenseCache(config, **options)
    dense.set_padding(mask)
    return handles, dense


def generate(model, ids, mask, cache, new=16):
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip


@pytest.mark.parametrize("length", [64, 65, 320, 321, 700])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("recipe", ["default", "balanced"])
def test_default_windows_at_their_edges(recipe, attn, length):
    model = tiny_model("llama", attn)
    ids, mask = prompt(1, length)
    handles, dense = caches(model.config, mask, **(CALIBRATED if recipe == "balanced" else {}))
    got, expected = generate(model, ids, mask, handles, 6), generate(model, ids, mask, dense, 6)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.logits[-1], expected.logits[-1], atol=1e-4, rtol=1e-3)
    assert handles.layers[0].store.history == max(0, length + 5 - 64 - 256)


def test_exact_while_everything_is_in_the_windows():
    model = tiny_model("qwen3")
    ids, mask = prompt(2, 300, (0, 20))
    got = generate(model, ids, mask, OscarCache(model.config), 12)
    expected = generate(model, ids, mask, None, 12)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.logits[-1], expected.logits[-1], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family, attn", [("llama", "sdpa"), ("llama", "eager"), ("gemma3n", "sdpa")])
def test_second_turn_and_chunked_prefill(family, attn):
    model = tiny_model(family, attn)
    ids, _ = prompt(2, 150)
    handles, dense = caches(model.config, torch.ones_like(ids), **WINDOWS)
    with torch.no_grad():
        for begin, end in ((0, 60), (60, 61), (61, 120), (120, 124), (124, 150)):
            got = model(input_ids=ids[:, begin:end], past_key_values=handles).logits
            expected = model(input_ids=ids[:, begin:end], past_key_values=dense).logits
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)
    assert handles.get_seq_length() == 150


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("pad", [3, 4, 5, 30, 70])
def test_padded_row_equals_the_row_alone(attn, pad):
    model = tiny_model("llama", attn)
    ids, mask = prompt(2, 100, (0, pad))
    with torch.no_grad():
        batch, alone = (OscarCache(model.config, **WINDOWS, **ROW_BY_ROW) for _ in range(2))
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=batch)
        model(input_ids=ids[1:, pad:], past_key_values=alone)
        extra, _ = prompt(2, 20, seed=1)
        for step in range(20):
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            got = model(
                input_ids=extra[:, step : step + 1], attention_mask=mask, past_key_values=batch,
                position_ids=mask.sum(-1, keepdim=True) - 1,
            ).logits[1]  # fmt: skip
            expected = model(input_ids=extra[1:, step : step + 1], past_key_values=alone).logits[0]
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_chunked_prefill_inside_the_padding(attn):
    """The first chunk of a row is padding only; where its sink begins is learned from a later chunk."""
    model = tiny_model("llama", attn)
    ids, mask = prompt(2, 90, (0, 50))
    whole, chunked = (OscarCache(model.config, **WINDOWS) for _ in range(2))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=whole)
        for begin, end in ((0, 40), (40, 90)):
            out = model(
                input_ids=ids[:, begin:end], attention_mask=mask[:, :end], position_ids=positions[:, begin:end],
                past_key_values=chunked,
            ).logits  # fmt: skip
            assert torch.isfinite(out).all()
    whole.commit()
    chunked.commit()
    assert whole.layers[0].store.padding.rows == chunked.layers[0].store.padding.rows == [0, 50]
    torch.testing.assert_close(whole.layers[0].store.keys.sink, chunked.layers[0].store.keys.sink, atol=1e-4, rtol=1e-3)


def test_bfloat16_and_float16_models_keep_their_dtype():
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny_model("llama").to(dtype)
        ids, mask = prompt(1, 60)
        cache = OscarCache(model.config, **WINDOWS)
        out = generate(model, ids, mask, cache)
        assert out.logits[-1].dtype in (dtype, torch.float32)
        assert cache.layers[0].store.keys.sink.dtype == dtype
        assert torch.isfinite(out.logits[-1]).all()


def test_only_full_attention_layers_are_ours():
    cache = OscarCache(tiny_config("gemma3"))
    assert [isinstance(layer, OscarLayer) for layer in cache.layers] == [False, True, True]
    with pytest.warns(UserWarning, match="nothing is quantized"):
        OscarCache(tiny_config("mistral_sliding"))
