"""Every family of models, from a tiny random one: OscarCache = its dense twin, static cache = growing cache."""

import functools

import pytest
import torch
import transformers
from dense_cache import DenseCache
from packaging.version import Version
from test_calibrate import tokenizer
from test_static import Counting
from tiny_models import EAGER_ONLY, ENCODER_DECODER, FAMILIES, TOKENS, VISION, inputs, prompt, tiny_config, tiny_model
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from oscar_hf import CacheStateError, OscarCache, OscarConfig, UnsupportedModelError
from oscar_hf.calibration import evaluate
from oscar_hf.calibration.calibrate import artifact_from_moments
from oscar_hf.calibration.moments import gather
from oscar_hf.cli.loading import load_model
from oscar_hf.transformers_compat import model_config as compat
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT

WINDOWS = dict(recipe="default", sink_tokens=4, recent_tokens=8)
# transformers passes the prompt's queries of layers that share keys whole to a static cache, but the last ones alone to a
# growing one: what is learned from them differs, so nothing is.
STORAGE = {"gemma4": dict(key_scale="search")}
# With seed 0 one code of a later layer lies on a rounding boundary.
SEEDS = {"qwen2": 1}
PADS = ((), (0, 13))
LENGTH, NEW = 50, 12
# Layers that are packed, where not all are: the others are sliding, chunked, linear, or linear and attention in one.
PACKED = {
    "mistral_sliding": [], "cohere2": [1, 2], "exaone4": [1, 2], "gemma2": [1], "gemma3": [1, 2], "gemma3n": [0],
    "gemma4": [0, 2], "gpt_oss": [1, 2], "llama4": [1, 3], "qwen3_next": [3], "qwen3_5": [3], "lfm2": [1, 3],
    "falcon_h1": [], "bamba": [1, 2], "gemma3_vision": [1, 2],
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:oscar_hf")
each_family = pytest.mark.parametrize("family", [*FAMILIES, *VISION])
each_attention = pytest.mark.parametrize("attn", ["sdpa", "eager"])


def options(family):
    return {**WINDOWS, **STORAGE.get(family, {})}


def generate(model, arguments, cache, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "disable_compile": True, **options}
    return model.generate(
        **arguments, **{CACHE_ARGUMENT: cache}, **options, output_logits=True, return_dict_in_generate=True
    )


def check_equal(got, expected):
    assert torch.equal(got.sequences, expected.sequences)
    for a, b in zip(got.logits, expected.logits):
        # Rounding can move a code of a later layer; wrong keys would be off by a hundred times as much.
        torch.testing.assert_close(a, b, atol=5e-3, rtol=5e-3)


@functools.cache
def grown(family, attn):
    """A model, arguments of generate() by padding, and what the growing caches gave for them."""
    model = tiny_model(family, attn, SEEDS.get(family, 0))
    arguments = {pads: inputs(family, 2, LENGTH, pads) for pads in PADS}
    caches = {pads: OscarCache(model.config, **options(family)) for pads in PADS}
    return model, arguments, caches, {pads: generate(model, arguments[pads], caches[pads]) for pads in PADS}


def skip_without(attn, family):
    if attn == "sdpa" and family in EAGER_ONLY:
        pytest.skip("transformers offers this family no sdpa attention")


@each_attention
@each_family
def test_growing_cache_equals_its_dense_twin(family, attn, recwarn):
    skip_without(attn, family)
    model, arguments, caches, results = grown(family, attn)
    for pads, got in results.items():
        twin = DenseCache(model.config, **options(family))
        twin.set_padding(arguments[pads]["attention_mask"])
        check_equal(got, generate(model, arguments[pads], twin))
        cache = caches[pads]
        packed = [index for index, layer in enumerate(cache.layers) if layer in cache.oscar_layers]
        assert packed == PACKED.get(family, list(range(model.config.get_text_config().num_hidden_layers)))
        for layer in cache.oscar_layers:
            assert layer.store.history == LENGTH + NEW - 1 - 4 - 8
            assert layer.store.padding.rows == list(pads)
    assert not [w for w in recwarn if "dequantized on every step" in str(w.message)], "the packed path was not taken"


@each_attention
@each_family
def test_static_cache_equals_the_growing_one(family, attn):
    skip_without(attn, family)
    model, arguments, _, results = grown(family, attn)
    for pads, expected in results.items():
        try:
            got = generate(model, arguments[pads], OscarCache(model.config, max_cache_len=64, **options(family)))
        except (TypeError, IndexError) as error:
            # Llama 4 and Gemma 3 with images before transformers 5.24.
            with pytest.raises(type(error)):
                generate(model, arguments[pads], StaticCache(model.config, 64))
            pytest.skip(f"transformers' own StaticCache fails, too: {error}")
        check_equal(got, expected)


# Graphs: one, and another for when a sliding layer is full.
@pytest.mark.parametrize("family, graphs", [("phi4", 1), ("glm4_moe", 1), ("gemma4", 2), ("bamba", 1)])
def test_decode_step_compiles(family, graphs):
    model, arguments, _, results = grown(family, "sdpa")
    counting = Counting("eager")
    for pads in PADS:
        cache = OscarCache(model.config, max_cache_len=64, **options(family))
        check_equal(generate(model, arguments[pads], cache, **counting.options), results[pads])
    if counting.graphs != graphs or counting.breaks:
        # An older torch cannot trace these models whole, or traces them twice (2.8: Gemma 4, Bamba), with transformers' cache, too.
        theirs = Counting("eager")
        for pads in PADS:
            generate(model, arguments[pads], StaticCache(model.config, 64), **theirs.options)
        assert Version(torch.__version__).release < (2, 9) and (theirs.breaks or counting.graphs <= theirs.graphs)


@pytest.mark.parametrize("family", FAMILIES)
def test_relative_models_say_the_same_at_all_positions(family):
    model = tiny_model(family, "eager")
    if not compat.is_relative(model.config):
        return
    ids, _ = prompt(1, 40)
    with torch.no_grad():
        near, far = (model(input_ids=ids, position_ids=first + torch.arange(40)[None]).logits for first in (0, 70))
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-3)


def test_which_models_are_relative():
    relative = {family for family in FAMILIES if compat.is_relative(tiny_config(family))}
    assert {"llama", "qwen2", "qwen3", "mistral", "gemma3"} <= relative


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_judges_the_models_own_logits(family):
    scaling = {"final_logit_softcapping": 5.0} if family.startswith("gemma") else {}
    scaling = {"lm_head_multiplier": 0.5} if family == "falcon_h1" else scaling
    model = tiny_model(family, "eager", **scaling)
    ids, _ = prompt(1, 20)
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0].float().log_softmax(-1)
        hidden = evaluate._hidden_states(model, ids, Cache(layers=compat.native_layers(model.config)))
        torch.testing.assert_close(evaluate._log_probabilities(model, hidden), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family, attn", [("gemma4", "sdpa"), ("gemma3n", "eager")])
def test_queries_of_layers_that_share_keys_are_calibrated(family, attn):
    model = tiny_model(family, attn)
    moments = gather(model, [prompt(1, 40)[0]], 4, True, lambda: None)
    artifact = artifact_from_moments(model, moments, OscarConfig.from_recipe("balanced"))
    assert sorted(artifact.layers) == PACKED[family]
    # The last packed layer is read by one more.
    queries = {layer: m.queries for layer, m in moments.items()}
    assert queries[PACKED[family][-1]] == 2 * (queries[0] if len(queries) > 1 else 40 * 2)
    cache = OscarCache(artifact=artifact, sink_tokens=4, recent_tokens=8)
    assert generate(model, inputs(family, 2, LENGTH, PADS[1]), cache).sequences.shape == (2, LENGTH + NEW)


def test_command_line_loads_a_family_without_sdpa(tmp_path):
    model = tiny_model("gpt_oss", "eager")
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    loaded, _ = load_model(str(tmp_path), device="cpu")
    assert loaded.config._attn_implementation == "eager"


def encoder_decoder(family, attn):
    """A model and arguments of generate(): an encoder prompt with padding, and a decoder prompt."""
    model = tiny_model(family, attn)
    ids, mask = prompt(2, 30, (0, 5))
    decoder_ids, _ = prompt(2, LENGTH, seed=3)
    decoder_ids[:, 0] = model.config.decoder_start_token_id
    return model, dict(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids)


@each_attention
@pytest.mark.parametrize("family", ENCODER_DECODER)
def test_self_attention_of_encoder_decoder_models(family, attn):
    model, arguments = encoder_decoder(family, attn)
    ours, twin = (kind(model.config, **WINDOWS) for kind in (OscarCache, DenseCache))
    got = generate(model, arguments, EncoderDecoderCache(ours, DynamicCache()))
    check_equal(got, generate(model, arguments, EncoderDecoderCache(twin, DynamicCache())))
    assert [layer.store.history for layer in ours.layers] == [LENGTH + NEW - 1 - 4 - 8] * 3
    static = OscarCache(model.config, max_cache_len=64, **WINDOWS)
    check_equal(generate(model, arguments, EncoderDecoderCache(static, StaticCache(model.config, 30))), got)


@pytest.mark.parametrize("length", [None, 128])
@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize("family", ENCODER_DECODER)
def test_bare_cache_in_an_encoder_decoder_model_is_refused(family, tokens, length):
    model, arguments = encoder_decoder(family, "sdpa")
    cache = OscarCache(model.config, max_cache_len=length, **WINDOWS)
    arguments["decoder_input_ids"] = arguments["decoder_input_ids"][:, :tokens]
    for _ in range(2):
        with pytest.raises(CacheStateError, match="EncoderDecoderCache"):
            generate(model, arguments, cache)
        cache.reset()
    # An empty cache is a fresh one.
    assert generate(model, arguments, EncoderDecoderCache(cache, DynamicCache())).sequences.shape[1] == tokens + NEW


def test_decoder_of_another_depth_than_the_encoder():
    cache = OscarCache(tiny_config("t5", num_decoder_layers=5), **WINDOWS)
    assert len(cache.layers) == 5


def test_latent_attention_is_refused():
    config = transformers.DeepseekV3Config(num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match="deepseek_v3 uses multi-head latent attention"):
        OscarCache(config, recipe="hadamard")


# Models whose attention is code of their own, which calls torch on what update() returns.
OLDER = {
    "GPT2": dict(), "GPTJ": dict(rotary_dim=8), "CodeGen": dict(rotary_dim=8), "OPT": dict(word_embed_proj_dim=64),
    "GPTNeo": dict(attention_types=[[["global"], 2]]), "GPTNeoX": dict(), "Bloom": dict(), "Falcon": dict(alibi=False),
    "StableLm": dict(num_key_value_heads=2), "Phi": dict(), "Persimmon": dict(),
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
def test_older_attention_code(name):
    torch.manual_seed(0)
    fields = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=512)
    config = getattr(transformers, f"{name}Config")(**TOKENS | fields | OLDER[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, 0.3)
    # In float64 no code is near enough to a rounding boundary.
    model, arguments = model.double(), inputs("llama", 2, LENGTH)
    expected = generate(model, arguments, DenseCache(config, **WINDOWS))
    check_equal(generate(model, arguments, OscarCache(config, **WINDOWS)), expected)
    if name != "Bloom":
        # Its prompts want keys as long as the cache.
        check_equal(generate(model, arguments, OscarCache(config, max_cache_len=64, **WINDOWS)), expected)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("family", ["phi3", "phimoe"])
def test_generate_uses_the_cache_whatever_the_length_of_the_text(family, static, recwarn):
    """Phi models throw a cache away when the text passes `original_max_position_embeddings`, without a word (K1)."""
    fields = dict(original_max_position_embeddings=40, max_position_embeddings=400)
    if family == "phimoe":
        # It states the length among its rotary parameters alone.
        config = transformers.PhimoeConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            num_local_experts=2, vocab_size=96, max_position_embeddings=400,
        )  # fmt: skip
        config.original_max_position_embeddings = 40
        model = transformers.PhimoeForCausalLM(config).eval()
    else:
        model = tiny_model(family, num_hidden_layers=2, **fields)
    ids, _ = prompt(1, 80)
    options = dict(max_new_tokens=3, do_sample=False, disable_compile=True)
    cache = OscarCache(model.config, recipe="hadamard", max_cache_len=120 if static else None)
    got = model.generate(ids[:, :60], **{CACHE_ARGUMENT: cache}, **options)
    assert cache.get_seq_length() == 62 and torch.equal(got, model.generate(ids[:, :60], **options))
    cache = OscarCache(model.config, recipe="hadamard", max_cache_len=120 if static else None)
    for length in (30, 60):
        model.generate(ids[:, :length], **{CACHE_ARGUMENT: cache}, **options)
        assert cache.get_seq_length() == length + 2
    assert not [warning for warning in recwarn if "rotary factors" in str(warning.message)]


def test_other_rotary_factors_beyond_a_length_are_warned_of():
    rope = dict(
        rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 8, long_factor=[2.0] * 8,
        original_max_position_embeddings=40, factor=10.0,
    )  # fmt: skip
    model = tiny_model(
        "phi3", num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, rope_parameters=rope,
        original_max_position_embeddings=40, max_position_embeddings=400,
    )  # fmt: skip
    ids, _ = prompt(1, 80)
    cache = OscarCache(model.config, recipe="hadamard")
    with torch.no_grad():
        model(ids[:, :30], **{CACHE_ARGUMENT: cache})
        with pytest.warns(
            UserWarning, match="beyond 40 tokens this model takes other rotary factors than those that the 30"
        ):
            model(ids[:, 30:50], **{CACHE_ARGUMENT: cache})
