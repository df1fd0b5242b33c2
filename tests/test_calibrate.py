"""Calibration: moments against a naive float64 computation, artifacts that fit and work, the command line."""

import json
import warnings

import pytest
import torch
from tiny_models import tiny_config, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oscar_hf import Artifact, ArtifactError, OscarCache, OscarConfig, UnsupportedModelError, calibrate
from oscar_hf.artifact.recipes import PUBLISHED_STORAGE
from oscar_hf.calibration.calibrate import layer_constants
from oscar_hf.calibration.evaluate import StreamingLayer, evaluate
from oscar_hf.calibration.moments import LayerMoments, gather
from oscar_hf.calibration.text import default_text, token_sequences
from oscar_hf.cli.main import main

WORDS = [f"w{i}" for i in range(90)]


def tokenizer(bos=False):
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "<unk>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", bos_token="<s>" if bos else None
    )


def text(words=3000, seed=0):
    picks = torch.randint(0, 90, (words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in picks.tolist())


def naive_moments(queries, keys, values, sink):
    """The formulas term by term, float64; queries [H, g, T, D], keys and values [H, T, D]."""
    queries, keys, values = queries.double(), keys.double(), values.double()
    heads, group, tokens, _ = queries.shape
    result = {"M": [], "CV": [], "mu": keys[:, sink:].mean(1), "C": []}
    for h in range(heads):
        stacked = torch.cat(list(queries[h]), 0)
        result["M"].append(stacked.T @ stacked / (tokens * group))
        weights = torch.stack([k @ result["M"][h] @ k for k in keys[h]])
        weights = weights / weights.mean()
        result["CV"].append(sum(w * torch.outer(v, v) for w, v in zip(weights, values[h])) / tokens)
        result["C"].append(torch.cov(keys[h, sink:].T, correction=0))
    return {name: value if isinstance(value, torch.Tensor) else torch.stack(value) for name, value in result.items()}


def test_moments_are_the_formulas():
    torch.manual_seed(0)
    queries, keys, values = torch.randn(2, 3, 40, 8), torch.randn(2, 40, 8) + 1, torch.randn(2, 40, 8)
    outputs = torch.randn(2, 3, 40, 8)
    moments = LayerMoments(sink_tokens=4)
    moments.add(queries, keys, values, outputs)
    moments.add_scored_values(keys, values)
    naive = naive_moments(queries, keys, values, 4)
    torch.testing.assert_close(moments.query_covariance, naive["M"])
    torch.testing.assert_close(moments.value_covariance("score"), naive["CV"])
    torch.testing.assert_close(moments.key_mean, naive["mu"])
    torch.testing.assert_close(moments.key_covariance, naive["C"])
    stacked = outputs.flatten(1, 2).double()
    torch.testing.assert_close(moments.value_covariance("attention"), stacked.mT @ stacked / 120)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_gathered_statistics_are_post_rope_and_equal_under_both_attentions(attn):
    model = tiny_model("qwen3", attn, num_hidden_layers=2)
    sequences = [torch.randint(2, 90, (1, 90), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    moments = gather(model, sequences, 8, True, lambda: None)
    assert sorted(moments) == [0, 1]
    # Keys as a plain cache holds them are post-RoPE: the mean must be theirs.
    means = []
    for ids in sequences:
        with torch.no_grad():
            cache = model(input_ids=ids, use_cache=True).past_key_values
        means.append(cache.layers[1].keys[0, :, 8:].double().mean(1))
    torch.testing.assert_close(moments[1].key_mean, torch.stack(means).mean(0), atol=1e-5, rtol=1e-4)
    assert moments[1].tokens == 180 and moments[1].late_tokens == 164 and moments[1].queries == 360


RECIPES = [
    dict(recipe="paper"),
    dict(recipe="paper", value_target="attention", per_head=True),
    dict(),
    dict(recipe="balanced", per_head=False, key_symmetric=False, key_scale="weighted_search_both_ends"),
    dict(recipe="balanced", key_transform="oscar", key_scale="search", value_transform="identity"),
    dict(recipe="balanced", key_center="none", key_scale="percentile(0.9)"),
    dict(recipe="balanced", key_center="mean"),
    dict(recipe="balanced", key_block=32),
    dict(recipe="paper", **PUBLISHED_STORAGE),
]


@pytest.mark.parametrize("options", RECIPES, ids=str)
def test_calibrate_save_load_generate(tmp_path, options):
    model = tiny_model("llama", num_hidden_layers=2)
    artifact = calibrate(model, tokenizer(), text(), tokens=2048, context=512, progress=False, **options)
    assert artifact.config.calibration["tokens"] == 2048 and artifact.config.num_key_value_heads == 2
    artifact.save(tmp_path / "a")
    loaded = Artifact.load(tmp_path / "a")
    assert loaded.config == artifact.config
    for layer, constants in artifact.layers.items():
        for name, tensor in constants.tensors().items():
            assert torch.equal(getattr(loaded.layers[layer], name), tensor), name
    cache = OscarCache.from_pretrained(tmp_path / "a", config=model.config, sink_tokens=4, recent_tokens=8)
    out = model.generate(torch.randint(2, 90, (1, 60)), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 64)
    with pytest.raises(ArtifactError, match="KV heads"):
        other = tiny_model("llama", num_hidden_layers=2, num_key_value_heads=4)
        cache = OscarCache(other.config, artifact=loaded)
        other.generate(torch.randint(2, 90, (1, 6)), past_key_values=cache, max_new_tokens=2)


def test_hybrid_models_calibrate_their_full_attention_layers():
    model = tiny_model("gemma3")
    artifact = calibrate(model, tokenizer(), text(), tokens=2048, context=512, progress=False)
    assert sorted(artifact.layers) == [1, 2]
    assert artifact.config.cache_fields["sliding_window"] == 24
    cache = OscarCache(artifact=artifact)
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicSlidingWindowLayer", "OscarLayer", "OscarLayer"]


def test_balanced_keys_have_the_metric_of_the_transformed_queries():
    torch.manual_seed(0)
    moments = LayerMoments(0)
    moments.add(
        torch.randn(2, 2, 400, 16), torch.randn(2, 400, 16), torch.randn(2, 400, 16), torch.randn(2, 2, 400, 16)
    )
    moments.add_scored_values(torch.randn(2, 400, 16), torch.randn(2, 400, 16))
    constants = layer_constants(moments, OscarConfig.from_recipe("balanced"))
    inverse = constants.key_inverse.double()
    metric = inverse @ moments.late_query_covariance @ inverse.mT
    metric = metric / metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    torch.testing.assert_close(constants.key_metric.double(), metric, atol=1e-4, rtol=1e-4)


def test_sequences_begin_with_bos_only_if_the_tokenizer_does():
    plain = token_sequences(tokenizer(bos=True), text(), 2048, 512, 0)
    assert len(plain) == 4 and all(s.shape == (1, 512) for s in plain) and plain[0][0, 0] != 1
    assert not torch.equal(plain[0], token_sequences(tokenizer(), text(), 2048, 512, 1)[0])


def test_sequences_are_as_long_as_asked_and_what_is_left_is_one_more():
    lengths = [s.shape[1] for s in token_sequences(tokenizer(), text(), 2500, 1000, 0)]
    assert lengths == [1000, 1000, 500]
    assert [s.shape[1] for s in token_sequences(tokenizer(), text(), 2100, 1000, 0)] == [1000, 1000]


def test_the_default_context_is_what_the_model_takes():
    model = tiny_model("llama", num_hidden_layers=2, max_position_embeddings=1500)
    artifact = calibrate(model, tokenizer(), text(4000), progress=False)
    assert artifact.config.calibration["context"] == artifact.config.longest_calibrated == 1500
    assert artifact.config.calibration["tokens"] == 4000
    model.config.max_position_embeddings = 1 << 20
    assert calibrate(model, tokenizer(), text(4000), progress=False).config.longest_calibrated == 4000


def test_short_sequences_are_spread_over_the_positions_of_the_model():
    """Slow pairs of channels turn by less than a radian within 256 tokens, and by many within 8,192."""
    model = tiny_model("llama", num_hidden_layers=2, max_position_embeddings=8192)
    options = dict(tokens=8192, progress=False, judge=False)
    spread = calibrate(model, tokenizer(), text(9000), context=256, **options)
    assert spread.config.calibration["context"] == 256 and spread.config.longest_calibrated == 8192
    whole = calibrate(model, tokenizer(), text(9000), context=8192, **options)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}
    start = calibrate(model, tokenizer(), text(9000), context=256, **options)
    assert start.config.longest_calibrated == 256
    metrics = [x.layers[0].key_transform @ x.layers[0].key_transform.mT for x in (spread, whole, start)]
    assert (metrics[0] - metrics[1]).norm() < 0.5 * (metrics[2] - metrics[1]).norm()


def test_what_needs_no_artifact_is_not_calibrated():
    with pytest.raises(ArtifactError, match="recipe: 'hadamard' as given needs no artifact"):
        calibrate(tiny_model("llama"), tokenizer(), text(), recipe="hadamard", progress=False)


def test_an_artifact_that_cannot_be_judged_is_kept():
    model = tiny_model("llama", "eager", num_hidden_layers=2)
    with pytest.warns(UserWarning, match="was made, but not compared .* needs a model with"):
        artifact = calibrate(model, tokenizer(), text(20_000), tokens=2048, context=512, progress=False)
    assert "held_out" not in artifact.config.calibration and artifact.layers


def test_shorter_sequences_are_taken_where_long_ones_do_not_fit_the_memory(monkeypatch):
    model, attempts = tiny_model("llama", num_hidden_layers=2, max_position_embeddings=1 << 20), []

    def scarce(model, sequences, *rest):
        attempts.append(sequences[0].shape[1])
        if attempts[-1] > 3000:
            raise torch.OutOfMemoryError("no more")
        return gather(model, sequences, *rest)

    monkeypatch.setitem(calibrate.__globals__, "gather", scarce)
    with pytest.warns(UserWarning, match="sequences of 5000 tokens do not fit the memory, calibrating on 2500"):
        artifact = calibrate(model, tokenizer(), text(5000), progress=False)
    assert attempts == [5000, 2500] and artifact.config.calibration["context"] == 2500
    with pytest.raises(torch.OutOfMemoryError):
        calibrate(model, tokenizer(), text(5000), context=4000, progress=False)


def test_a_cache_warns_once_when_it_passes_what_was_calibrated():
    model = tiny_model("llama", num_hidden_layers=2)
    artifact = calibrate(model, tokenizer(), text(), tokens=2048, context=200, progress=False)
    assert artifact.config.longest_calibrated == model.config.max_position_embeddings
    artifact = artifact.with_provenance({"positions": 200})
    cache = OscarCache(model.config, artifact=artifact, sink_tokens=4, recent_tokens=8)
    for new in (200, 1, 1, 30):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.randint(2, 90, (1, new)), past_key_values=cache)
        said = [str(w.message) for w in caught if "calibrated on positions up to 200" in str(w.message)]
        assert len(said) == (cache.get_seq_length() == 201), said
    assert cache.get_seq_length() == 232
    with pytest.warns(UserWarning, match="hold 300 tokens, but calibration was calibrated on positions up to 200"):
        OscarCache(model.config, artifact=artifact, max_cache_len=300)


def test_short_text_is_refused():
    with pytest.raises(ArtifactError, match="at least 2048 tokens"):
        token_sequences(tokenizer(), text(100), 2048, 512, 0)


def test_latent_attention_and_models_without_full_attention_are_refused():
    model = tiny_model("mistral_sliding")
    with pytest.raises(UnsupportedModelError, match="nothing to calibrate"):
        calibrate(model, tokenizer(), text(), tokens=2048, context=512, progress=False)
    config = tiny_config("llama")
    config.kv_lora_rank = 8
    model = tiny_model("llama")
    model.config.kv_lora_rank = 8
    with pytest.raises(UnsupportedModelError, match="latent"):
        calibrate(model, tokenizer(), text(), tokens=2048, context=512, progress=False)


def test_the_default_text_ships_with_the_package():
    words, source = default_text()
    assert "Emma Woodhouse" in words and "def quantize" in words and "Emma" in source


def decoded_kl(model, cache, ids, prompt, first):
    """KL at positions `first`.. of a real decode, `prompt` tokens at once, from the exact model."""
    rows = []
    with torch.no_grad():
        rows.append(model(input_ids=ids[:, :prompt], past_key_values=cache).logits[0])
        for position in range(prompt, ids.shape[1]):
            rows.append(model(input_ids=ids[:, position : position + 1], past_key_values=cache).logits[0])
        got = torch.cat(rows).log_softmax(-1)[first:-1]
        expected = model(input_ids=ids).logits[0].log_softmax(-1)[first:-1]
    return (expected.exp() * (expected - got)).sum(-1).mean().item()


def test_evaluation_is_token_by_token_decoding():
    """The one-pass protocol gives the distributions of a real decode through OscarCache; blocks of 32 keys fit the window."""
    model = tiny_model("llama", num_hidden_layers=2)
    artifact = calibrate(model, tokenizer(), text(), tokens=2048, context=512, progress=False)
    ids = torch.randint(2, 90, (1, 120), generator=torch.Generator().manual_seed(5))
    windows = dict(sink_tokens=4, recent_tokens=32)
    quality = evaluate(model, artifact, [ids], first_position=60, **windows)
    kl = decoded_kl(model, OscarCache(model.config, artifact=artifact, **windows), ids, 1, 60)
    assert quality.kl == pytest.approx(kl, rel=1e-3) and kl > 0
    # Scales of keys and of values, and a center for each block of 32 keys.
    assert quality.positions == 59 and quality.bits == 2 + 16 / 16 + 16 / 32 / 2
    assert evaluate(model, artifact, [ids], side="v", **windows).kl < quality.kl
    with pytest.raises(ArtifactError, match="first_position"):
        evaluate(model, artifact, [ids], first_position=119)


@pytest.mark.parametrize("recipe", ["default", "hadamard"])
def test_evaluation_learns_from_what_comes_before_the_judged_positions(recipe):
    """As a cache does whose prompt that is; with one layer the prompt's own errors reach no key."""
    model = tiny_model("llama", num_hidden_layers=1)
    ids = torch.randint(2, 90, (1, 160), generator=torch.Generator().manual_seed(5))
    windows = dict(sink_tokens=4, recent_tokens=32)
    quality = evaluate(model, Artifact.data_free(recipe), [ids], first_position=100, **windows)
    kl = decoded_kl(model, OscarCache(model.config, recipe=recipe, **windows), ids, 100, 100)
    # A real prompt's last tokens stay exact for one call more.
    assert quality.kl == pytest.approx(kl, rel=0.1) and kl > 0


def test_bits_count_keys_and_values_by_their_own_dims():
    model = tiny_model("llama", num_hidden_layers=2)
    config = OscarConfig.from_recipe("hadamard", key_scale="search", key_symmetric=False)
    layer = StreamingLayer(Artifact.data_free("hadamard"), config, 0, "kv", 100)
    layer.update(torch.zeros(1, 2, 3, 256), torch.zeros(1, 2, 3, 64))
    # Keys: two groups of 128 with scale and minimum, and a 128th of a center; values: one group with a scale.
    assert layer.bits == 2 + (2 * 32 + 16 + 256 * 16 / 128) / (256 + 64)
    ids = torch.randint(2, 90, (1, 40))
    assert (
        evaluate(model, Artifact.data_free(), [ids], value_scale="search", value_symmetric=False).bits
        == 2 + 24 / 16 + 16 / 128 / 2
    )
    assert evaluate(model, Artifact.data_free(), [ids], key_block=32).bits == 2 + 1 + 16 / 32 / 2
    assert evaluate(model, Artifact.data_free(), [ids], key_center="none").bits == 3


def test_an_artifact_is_judged_on_the_end_of_a_long_text():
    model = tiny_model("llama", num_hidden_layers=2)
    options = dict(tokens=2048, context=512, progress=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = calibrate(model, tokenizer(), text(20_000), **options).config.calibration["held_out"]
    assert found["tokens"] > 1000 and set(found) == {"tokens", "kl", "kl_default", "kl_hadamard"}
    assert all(found[name] > 0 for name in ("kl", "kl_default", "kl_hadamard"))
    warned = any("this artifact is no better" in str(w.message) for w in caught)
    assert warned == (found["kl"] >= min(found["kl_default"], found["kl_hadamard"]))
    # Of a short text nothing is kept out, and nobody has to ask for it.
    assert "held_out" not in calibrate(model, tokenizer(), text(), **options).config.calibration
    assert "held_out" not in calibrate(model, tokenizer(), text(20_000), judge=False, **options).config.calibration


def test_a_gguf_file_that_nobody_named_is_hinted_at(tmp_path, capsys):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for command in (["calibrate", str(tmp_path), "-o", str(tmp_path / "a")], ["plan", str(tmp_path)]):
        assert main(command) == 2
        assert "; name its GGUF file with --gguf-file" in capsys.readouterr().err


def test_command_line(tmp_path, capsys):
    model, words = tmp_path / "model", tmp_path / "text.txt"
    tiny_model("llama", num_hidden_layers=2).save_pretrained(model)
    tokenizer().save_pretrained(model)
    words.write_text(text(4000), encoding="utf-8")
    common = [str(model), "--device", "cpu", "--dtype", "float32", "--text", str(words), "--context", "512"]
    assert main(["calibrate", *common, "-o", str(tmp_path / "a"), "--tokens", "2048"]) == 0
    assert "sound" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "balanced" in out and "text.txt" in out and "2048" in out
    report = tmp_path / "eval.json"
    arguments = ["eval", *common, "--artifact", str(tmp_path / "a"), "--sequences", "4", "--json", str(report)]
    assert main(arguments) == 0
    assert json.loads(report.read_text())[str(tmp_path / "a")]["positions"] == 4 * 255
    assert "perplexity   float32\n" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    assert "not a folder" in capsys.readouterr().err
    assert main(["calibrate", str(tmp_path / "no-model"), "-o", str(tmp_path / "b"), "--device", "cpu"]) == 2
    assert "cannot load the model" in capsys.readouterr().err and not (tmp_path / "b").exists()


def test_an_interrupted_calibration_leaves_nothing(tmp_path, monkeypatch, capsys):
    model = tmp_path / "model"
    tiny_model("llama", num_hidden_layers=2).save_pretrained(model)
    tokenizer().save_pretrained(model)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("oscar_hf.calibration.moments.LayerMoments.add_scored_values", interrupt)
    (tmp_path / "t.txt").write_text(text(4000))
    arguments = [
        "calibrate",
        str(model),
        "--device",
        "cpu",
        "--text",
        str(tmp_path / "t.txt"),
        "-o",
        str(tmp_path / "a"),
    ]
    assert main(arguments) == 130
    assert "nothing was written" in capsys.readouterr().err and not (tmp_path / "a").exists()


def test_what_cannot_work_is_refused_before_the_work(tmp_path, capsys):
    model, words, artifact = tmp_path / "model", tmp_path / "text.txt", tmp_path / "other"
    tiny_model("llama", num_hidden_layers=2).save_pretrained(model)
    tokenizer().save_pretrained(model)
    words.write_text(text(4000), encoding="utf-8")
    wide = tiny_model("llama", num_hidden_layers=2, head_dim=32)
    calibrate(wide, tokenizer(), text(), tokens=2048, context=512, progress=False).save(artifact)
    common = [str(model), "--device", "cpu", "--text", str(words)]
    for arguments, message in (
        (["calibrate", *common, "-o", str(words)], "cannot write the folder"),
        (["calibrate", *common, "-o", ""], "cannot write the folder"),
        (["calibrate", *common, "-o", str(tmp_path / "a"), "--context", "64"], "more than 128 tokens"),
        (["calibrate", *common, "-o", str(tmp_path / "a"), "--tokens", "100"], "at least 2048 tokens"),
        (
            ["eval", *common, "--artifact", str(artifact), "--context", "512"],
            "KV heads of dim 32 (values 32) in layer 0, the model has 2 of dim 16",
        ),
        (["eval", *common, "--artifact", str(artifact), "--json", str(tmp_path)], "cannot write the file"),
    ):
        assert main(arguments) == 2, arguments
        assert message in capsys.readouterr().err
    for arguments in (["--seed", "9" * 30], ["--seed", "-1"], ["--tokens", "0"]):
        with pytest.raises(SystemExit):
            main(["calibrate", *common, "-o", str(tmp_path / "a"), *arguments])
    assert not (tmp_path / "a").exists()
