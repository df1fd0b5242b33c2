"""`oscar-hf plan`: what it says before anything is loaded is what a cache then does and takes."""

import json

import pytest
import torch
import transformers
from tiny_models import ENCODER_DECODER, FAMILIES, VISION, inputs, tiny_config, tiny_model
from transformers.cache_utils import CacheLayerMixin

from oscar_hf import Artifact, OscarCache, OscarError
from oscar_hf.artifact.recipes import PUBLISHED_STORAGE
from oscar_hf.cache.layer import OscarLayer
from oscar_hf.cli.main import main
from oscar_hf.cli.plan import plan_config
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT

pytestmark = pytest.mark.filterwarnings("ignore:oscar_hf")
SMALL = Artifact.data_free("hadamard", sink_tokens=4, recent_tokens=8)
QWEN3_8B = dict(
    hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    max_position_embeddings=131072,
)  # fmt: skip


def saved(folder, config):
    config.save_pretrained(folder)
    return str(folder)


def plan_of(family, **overrides):
    return plan_config(tiny_config(family, **overrides), SMALL, family)


@pytest.mark.parametrize("length", [None, 128])
@pytest.mark.parametrize("family", [*FAMILIES, *VISION])
def test_plan_is_what_a_cache_takes(family, length):
    model = tiny_model(family, "eager").to(torch.bfloat16)
    arguments = {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs(family, 1, 90).items()}
    plan = plan_config(model.config, SMALL, context=90, max_cache_len=length)
    cache = OscarCache(model.config, artifact=SMALL, max_cache_len=length)
    with torch.no_grad():
        model(**arguments, **{CACHE_ARGUMENT: cache})
    report = cache.memory_report()
    assert plan.is_learned == bool(cache.oscar_layers)
    assert len(plan.layers) == len(cache.layers) and plan.is_static == (length is not None)
    for index, (planned, layer) in enumerate(zip(plan.layers, cache.layers)):
        regions = {name: size for name, size in report.layers[index].regions.items() if name != "constants"}
        assert (planned.path == "native") == (not isinstance(layer, OscarLayer))
        if isinstance(layer, OscarLayer):
            assert planned.bytes == sum(regions.values())
            assert (1, planned.kv_heads, planned.key_dim, planned.value_dim) == layer.store.geometry
        elif isinstance(layer, CacheLayerMixin) and layer.keys is not None:
            assert planned.bytes == planned.bytes_bf16 == layer.keys.nbytes + layer.values.nbytes
        else:
            assert planned.bytes == 0 and "state" in planned.why


def test_command(tmp_path, capsys):
    folder = saved(tmp_path / "model", transformers.Qwen3Config(**QWEN3_8B))
    target = tmp_path / "plan.json"
    assert main(["plan", folder, "--context", "102400", "--json", str(target)]) == 0
    out = capsys.readouterr().out
    # 36 equal layers are one line.
    (line,) = [line for line in out.splitlines() if "full_attention" in line]
    assert line.split()[:8] == ["0-35", "full_attention", "fused", "8", "4", "128", "128", "2.19"]
    # For each of 8 heads a transform, its inverse and a metric, float32.
    assert "7.15x smaller than BF16; the rotations, 54.25 MiB, are each cache's own and are not counted" in out
    plan = json.loads(target.read_text())
    assert plan["context"] == 102400 and plan["is_static"] is False and len(plan["layers"]) == 36
    assert plan["totals"]["bytes_bf16"] == 102400 * 147456
    # 2 bits a code, a scale of 16 bits for 128 of them, and a center of a block of 128 keys.
    assert plan["layers"][0]["token_bytes"] == 8 * (2 * (32 + 2) + 2) and plan["layers"][0]["token_bytes_bf16"] == 4096
    # All layers begin with one Hadamard matrix and its inverse, for keys and for values.
    assert plan["is_learned"] and plan["constants"] == 4 * 128 * 128 * (36 * 3 * 8 + 4)
    assert main(["plan", folder, "--max-cache-len", "4096"]) == 0
    assert "static cache of 4,096 tokens" in capsys.readouterr().out


def test_context_by_default(tmp_path):
    assert plan_of("llama").context == 2048
    assert plan_config(transformers.Qwen3Config(**QWEN3_8B), SMALL).context == 32768


@pytest.mark.parametrize(
    "dim, path", [(64, "fused"), (96, "PyTorch"), (128, "fused"), (256, "fused"), (512, "PyTorch")]
)
def test_path_follows_the_kernel(dim, path):
    layer = plan_of("llama", head_dim=dim).layers[0]
    assert layer.path == path and (path == "fused" or f"got {dim}" in layer.why)


def test_eager_attention_is_not_fused():
    layer = plan_of("gpt_oss", head_dim=64).layers[1]
    assert layer.path == "PyTorch" and "no sdpa attention" in layer.why


def test_storage_comes_from_the_artifact():
    artifact = Artifact.data_free("hadamard", group_size=32)
    layer = plan_config(tiny_config("qwen3"), artifact).layers[0]
    # A scale for 32 elements, and a center of 16 bits for 128 keys.
    assert layer.group_size == 32 and layer.bits_per_element == 2.5 + 16 / 128 / 2
    plain = Artifact.data_free("hadamard", group_size=32, key_center="none")
    assert plan_config(tiny_config("qwen3"), plain).layers[0].bits_per_element == 2.5
    both = plan_config(tiny_config("qwen3"), Artifact.data_free("hadamard", **PUBLISHED_STORAGE))
    assert both.layers[0].bits_per_element == 2.5
    # A rotation and its inverse, for keys and for values, of all layers.
    assert not both.is_learned and "come once per model" in str(both) and both.constants == 4 * 4 * 64 * 64
    mixed = plan_config(
        tiny_config("qwen3"), Artifact.data_free("hadamard", value_scale="search", value_symmetric=False)
    ).layers[0]
    assert mixed.path == "PyTorch" and "min" in mixed.why


def test_layers_that_differ_and_layers_that_keep_nothing(capsys):
    plan = plan_of("gemma4")
    assert [(layer.type[:4], layer.kv_heads, layer.key_dim) for layer in plan.layers] == [
        ("full", 1, 32), ("slid", 2, 16), ("full", 1, 32),
    ]  # fmt: skip
    assert "the last 2 layers keep nothing" in str(plan)
    assert [layer.type for layer in plan_of("mistral_sliding").layers] == ["sliding_attention"] * 3
    assert "nothing is quantized" in str(plan_of("falcon_h1")) and "as large as BF16" in str(plan_of("falcon_h1"))


@pytest.mark.parametrize("family", ENCODER_DECODER)
def test_encoder_decoder(family):
    plan = plan_of(family)
    assert [layer.kv_heads for layer in plan.layers] == [4] * 3 and "EncoderDecoderCache" in str(plan)


def test_refused_models_say_why(tmp_path, capsys):
    folder = saved(tmp_path / "latent", transformers.DeepseekV3Config())
    assert main(["plan", folder]) == 2
    assert "multi-head latent attention" in capsys.readouterr().err
    folder = saved(tmp_path / "odd", tiny_config("llama", head_dim=12))
    assert main(["plan", folder]) == 2
    assert "head dim 12, allowed are multiples of 8" in capsys.readouterr().err


def test_bad_arguments(tmp_path, capsys):
    assert main(["plan", str(tmp_path)]) == 2
    assert "cannot read the config" in capsys.readouterr().err
    folder = saved(tmp_path / "model", tiny_config("llama"))
    assert main(["plan", folder, "--artifact", str(tmp_path / "nothing")]) == 2
    with pytest.raises(SystemExit):
        main(["plan", folder, "--context", "9", "--max-cache-len", "9"])


def test_artifact_of_another_model(tmp_path):
    artifact = Artifact.data_free("hadamard", num_key_value_heads=8)
    with pytest.raises(OscarError, match="made for KV heads 8, this model has 2"):
        plan_config(tiny_config("llama"), artifact)


def test_config_without_heads():
    config = transformers.PreTrainedConfig()
    config.num_hidden_layers = 2
    with pytest.raises(OscarError, match="states no number for num_attention_heads"):
        plan_config(config, SMALL)
