"""Ways into and out of generate() around the cache: pipelines, streams, scores, embeddings, foreign drafts, long padding, chats."""

import threading

import pytest
import torch
from dense_cache import DenseCache
from tiny_models import prompt, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DynamicCache,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)

from oscar_hf import OscarCache
from oscar_hf.artifact.recipes import PUBLISHED_STORAGE
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT

WINDOWS = dict(sink_tokens=4, recent_tokens=8)
# What a row is stored as then does not depend on the rows beside it: no block of keys and nothing learned.
ROW_BY_ROW = dict(recipe="hadamard", **PUBLISHED_STORAGE)
KINDS = ["growing", "static"]


def new_cache(model, kind, length=256, **fields):
    room = dict(max_cache_len=length) if kind == "static" else {}
    return OscarCache(model.config, **{**WINDOWS, **fields}, **room)


def generate(model, kind, ids, mask=None, cache=None, **options):
    options = dict(max_new_tokens=14, do_sample=False, disable_compile=True, pad_token_id=0) | options
    cache = new_cache(model, kind) if cache is None else cache
    return model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **options)


def tokenizer(prefix="w"):
    """One word per token of the tiny models: w0 w1 ..."""
    words = {f"{prefix}{i}": i for i in range(96)}
    made = Tokenizer(models.WordLevel(words, unk_token=f"{prefix}1"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=f"{prefix}0", eos_token=f"{prefix}95")


def text(ids):
    return " ".join(f"w{i}" for i in ids.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_text_generation_pipeline(kind):
    model = tiny_model("qwen3")
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
    ids = prompt(1, 50)[0]
    expected = generate(model, kind, ids)
    options = {CACHE_ARGUMENT: new_cache(model, kind), "disable_compile": True}
    got = pipe(text(ids[0]), max_new_tokens=14, do_sample=False, return_full_text=False, **options)
    # Special tokens are left out of texts.
    assert got[0]["generated_text"].split() == [w for w in text(expected[0, 50:]).split() if w not in ("w0", "w95")]


@pytest.mark.parametrize("kind", KINDS)
def test_streaming(kind):
    model, ids = tiny_model("qwen3"), prompt(1, 50)[0]
    streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True)
    thread = threading.Thread(target=generate, args=(model, kind, ids), kwargs=dict(streamer=streamer))
    thread.start()
    words = "".join(streamer).split()
    thread.join()
    assert words == text(generate(model, kind, ids)[0, 50:]).split()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_scores_states_and_attentions(kind, attn):
    """What generate() can return beside tokens; attention weights are those of a dense twin."""
    model, (ids, mask) = tiny_model("qwen3", attn), prompt(2, 40, (0, 9))
    wanted = dict(output_scores=True, output_logits=True, output_hidden_states=True, return_dict_in_generate=True)
    if attn == "eager":
        wanted["output_attentions"] = True
    plain = generate(model, kind, ids, mask)
    got = generate(model, kind, ids, mask, **wanted)
    assert torch.equal(got.sequences, plain) and len(got.scores) == len(got.logits) == 14
    assert isinstance(getattr(got, CACHE_ARGUMENT, got.past_key_values), OscarCache)
    if attn == "eager":
        twin = DenseCache(model.config, **WINDOWS)
        # Dense tensors do not let a cache see the mask.
        twin.set_padding(mask)
        expected = generate(model, "growing", ids, mask, twin, **wanted)
        for ours, theirs in zip(got.attentions[-1], expected.attentions[-1]):
            torch.testing.assert_close(ours[..., : theirs.shape[-1]], theirs, atol=2e-5, rtol=1e-4)
            assert not ours[..., theirs.shape[-1] :].any()


@pytest.mark.parametrize("kind", KINDS)
def test_own_stopping_criterion(kind):
    class AfterFive(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full(input_ids.shape[:1], input_ids.shape[1] >= 55)

    model, ids = tiny_model("qwen3"), prompt(1, 50)[0]
    stopped = generate(model, kind, ids, stopping_criteria=StoppingCriteriaList([AfterFive()]))
    assert torch.equal(stopped, generate(model, kind, ids)[:, :55])


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_as_embeddings(kind):
    model, ids = tiny_model("qwen3"), prompt(1, 50)[0]
    options = dict(max_new_tokens=14, do_sample=False, disable_compile=True)
    embeddings = model.get_input_embeddings()(ids)
    got = model.generate(inputs_embeds=embeddings, **{CACHE_ARGUMENT: new_cache(model, kind)}, **options)
    assert torch.equal(got, generate(model, kind, ids)[:, 50:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("foreign", ["head dim", "tokenizer"])
def test_drafts_of_a_foreign_model(kind, foreign):
    """A draft model of another head dim, and one with a tokenizer of its own: the tokens are the main model's.

    The first drafts come with the prompt, so nothing may be learned from it; a block of keys is no longer than the window, so
    that what it is centered by does not depend on drafts, and one is opened on the way.
    """
    model, ids = tiny_model("qwen3"), prompt(1, 135)[0]
    draft, options = tiny_model("llama", num_hidden_layers=1, head_dim=32), {}
    if foreign == "tokenizer":
        draft = tiny_model("llama", num_hidden_layers=1, vocab_size=128)
        options = dict(tokenizer=tokenizer(), assistant_tokenizer=tokenizer("v"))
    caches = [new_cache(model, kind, recent_tokens=40, recipe="hadamard", key_scale="search") for _ in range(2)]
    got = generate(model, kind, ids, cache=caches[0], assistant_model=draft, eos_token_id=95, **options)
    assert torch.equal(got, generate(model, kind, ids, cache=caches[1], eos_token_id=95))
    assert caches[1].oscar_layers[0].store.history == 135 + 13 - 4 - 40
    # With what is learned from prompt and drafts a growing and a static cache still agree.
    got = generate(model, kind, ids, assistant_model=draft, eos_token_id=95, **options)
    other = "static" if kind == "growing" else "growing"
    assert torch.equal(got, generate(model, other, ids, assistant_model=draft, eos_token_id=95, **options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("pad", [0, 63, 64, 200, 500])
def test_a_left_padded_row_equals_the_row_alone(pad, attn, kind):
    """Default windows, the sink on the first 64 real tokens, and steps on top."""
    model, real = tiny_model("qwen3", attn, max_position_embeddings=2048), 400
    ids, mask = prompt(2, pad + real, (pad, 0))
    options, steps = dict(sink_tokens=64, recent_tokens=256, **ROW_BY_ROW), 3
    logits = []
    with torch.no_grad():
        for rows, first in ((slice(0, 2), 0), (slice(0, 1), pad)):
            cache = new_cache(model, kind, pad + real, **options)
            for part in (
                slice(first, pad + real - steps),
                *(slice(i, i + 1) for i in range(pad + real - steps, pad + real)),
            ):
                seen = mask[rows, first : part.stop]
                out = model(
                    ids[rows, part], attention_mask=seen, position_ids=(seen.cumsum(-1) - 1).clamp(min=0)[:, part.start - first :],
                    **{CACHE_ARGUMENT: cache},
                )  # fmt: skip
            logits.append(out.logits[0, -1])
    torch.testing.assert_close(*logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_right_padding_and_hidden_rows_give_no_nan(kind, attn):
    model = tiny_model("qwen3", attn)
    ids, mask = prompt(3, 60)
    mask[0, 40:] = 0
    mask[1] = 0
    cache = new_cache(model, kind)
    with torch.no_grad():
        first = model(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}).logits
        longer = torch.cat([mask, torch.tensor([[1], [0], [1]])], 1)
        step = model(ids[:, :1], attention_mask=longer, **{CACHE_ARGUMENT: cache}).logits
    assert first.isfinite().all() and step.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_five_turns_of_a_chat(kind):
    """Each turn packs more; the same as one cache that is fed the growing chat anew by forward calls of the same pieces."""
    model = tiny_model("qwen3", max_position_embeddings=2048)
    chat, cache, twin = (
        prompt(1, 30)[0],
        new_cache(model, kind, 512),
        DenseCache(model.config, **WINDOWS),
    )
    expected = chat
    for turn in range(5):
        chat = generate(model, kind, chat, cache=cache)
        expected = generate(model, "growing", expected, cache=twin)
        assert torch.equal(chat, expected)
        said = prompt(1, 11, seed=turn + 1)[0]
        chat, expected = torch.cat([chat, said], 1), torch.cat([expected, said], 1)
        assert int(cache.get_seq_length()) == chat.shape[1] - 12
        assert cache.oscar_layers[0].store.history == chat.shape[1] - 12 - 4 - 8


def test_exact_while_all_is_in_the_windows():
    """The interfaces above on top of DynamicCache: nothing in them depends on ours."""
    model, ids = tiny_model("qwen3"), prompt(1, 50)[0]
    wide = new_cache(model, "growing", sink_tokens=64, recent_tokens=256)
    assert torch.equal(
        generate(model, "growing", ids, cache=wide),
        generate(model, "growing", ids, cache=DynamicCache(config=model.config)),
    )
