"""What masks say, against the definition slot by slot, and how long the answers are remembered."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_config

from oscar_hf import OscarCache
from oscar_hf.masks import (
    MaskMemory,
    first_visible,
    first_visible_of_weights,
    is_causal,
    leading_hidden,
    shows_any_before,
    visible,
)


def causal(new, total, starts=(0,)):
    """What transformers makes for left-padded rows: bool [B, 1, M, T]."""
    slots = torch.arange(total)
    mask = slots <= torch.arange(total - new, total)[:, None]
    return (mask & (slots >= torch.tensor(starts)[:, None, None]))[:, None]


def additive(mask, dtype=torch.float32, value=None):
    value = torch.finfo(dtype).min if value is None else value
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [None, float("-inf")])
def test_additive_masks_say_what_bool_ones_do(dtype, value):
    mask = causal(5, 20, (0, 7))
    other = additive(mask, dtype, value)
    assert torch.equal(visible(other), mask)
    assert first_visible(other).tolist() == first_visible(mask).tolist() == [0, 7]
    assert leading_hidden(other, 5, 20) == leading_hidden(mask, 5, 20) == [0, 7]


def test_rows_that_see_nothing_begin_after_the_last_slot():
    mask = causal(5, 20, (0, 20))
    assert first_visible(mask).tolist() == [0, 20]


def test_only_causal_masks_are_causal():
    mask = causal(3, 20)
    assert is_causal(mask, 3) and is_causal(additive(mask), 3)
    assert not is_causal(torch.ones(1, 1, 3, 20, dtype=torch.bool), 3)
    assert not is_causal(mask[:, :, :1], 3)


def test_leading_slots_are_all_that_may_be_hidden():
    plain = causal(4, 12, (0, 3))
    hole, later, bias = plain.clone(), plain.clone(), additive(plain)
    hole[0, 0, 2, 5] = False
    later[1, 0, 0, 10] = True
    bias[0, 0, 0, 0] = -0.5
    for mask in (hole, later, bias, plain.expand(2, 4, 4, 12), plain[..., :11]):
        assert leading_hidden(mask, 4, 12) is None
    assert leading_hidden(F.pad(plain, (0, 9), value=True), 4, 12) == [0, 3]


def test_slots_shown_before_a_start_are_found():
    mask = causal(4, 12, (0, 3))
    assert not shows_any_before(mask, torch.tensor([0, 3]))
    assert shows_any_before(mask, torch.tensor([0, 4]))


@pytest.mark.parametrize("starts", [(0, 0), (0, 6), (3, 9)])
def test_weights_of_eager_attention_show_padding(starts):
    mask = causal(10, 10, starts)
    scores = torch.randn(2, 4, 10, 10, generator=torch.Generator().manual_seed(0))
    assert first_visible_of_weights((scores + additive(mask)).softmax(-1)).tolist() == list(starts)


def counting(answers):
    return lambda: answers.append(1) or len(answers)


def test_layers_of_a_forward_share_an_answer_and_a_rewritten_mask_is_read_anew():
    memory, mask, looks = MaskMemory(), causal(5, 20), []
    memory.last_layer = 9
    for layer in range(3):
        memory.enter(layer)
        assert memory.ask(layer, mask, "q", counting(looks)) == 1
    mask[0, 0, 0, 0] = False
    assert memory.ask(2, mask, "q", counting(looks)) == 2
    other = mask.clone()
    assert memory.ask(2, other, "q", counting(looks)) == 3 and memory.ask(2, mask, "q", counting(looks)) == 2
    memory.enter(0)
    assert memory.ask(0, mask, "q", counting(looks)) == 4


def test_masks_made_in_inference_mode_are_remembered_for_one_forward():
    memory, looks = MaskMemory(), []
    with torch.inference_mode():
        mask = causal(5, 20)
    for expected in (1, 2):
        for layer in range(2):
            memory.enter(layer)
            assert memory.ask(layer, mask, "q", counting(looks)) == expected


def test_nothing_is_kept_beyond_the_last_layer_or_in_copies():
    memory, mask = MaskMemory(), causal(5, 20)
    memory.last_layer = 1
    memory.ask(0, mask, "q", lambda: 1)
    assert copy.deepcopy(memory)._known == []
    memory.ask(1, mask, "q", lambda: 1)
    gone = weakref.ref(mask)
    del mask
    assert gone() is None


@pytest.mark.parametrize("room", [None, 256])
def test_a_mask_that_is_written_in_place_is_answered_anew(room):
    """A preallocated 4D mask, refilled between two calls of the same shape (HOUSE 1.2)."""
    config = tiny_config("llama", num_hidden_layers=1)
    caches = [
        OscarCache(config, recipe="hadamard", sink_tokens=4, recent_tokens=8, max_cache_len=room) for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(0)

    def states(count, heads=2):
        return torch.randn(1, heads, count, 16, generator=generator)

    prompt, new, query = (states(40), states(40)), (states(70), states(70)), states(70, 4)
    plain = causal(70, 110)
    tree = plain & (torch.rand(plain.shape, generator=generator) < 0.7) | torch.eye(110, dtype=torch.bool)[-70:]
    outputs = []
    for cache, buffer in zip(caches, (plain.clone(), None)):
        cache.update(*prompt, 0)
        for mask in (plain, tree):
            if buffer is not None:
                mask = buffer.copy_(mask)
            keys, values = cache.update(*new, 0)
            outputs.append(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True))
            cache.crop(-70)
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
    assert (outputs[0] - outputs[1]).abs().max() > 0.1
