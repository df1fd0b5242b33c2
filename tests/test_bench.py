"""The bench command: what can be checked without a GPU, and one small run of each part with one."""

import pytest
import torch
from tiny_models import prompt, tiny_model

from oscar_hf import OscarCache, OscarError
from oscar_hf.bench.generation import SHAPES, bench_generation, shaped_model, synthetic_artifact
from oscar_hf.bench.generation import format_rows as format_generation
from oscar_hf.bench.kernel import ROWS, Row, bench_kernel, format_rows, packed_bytes
from oscar_hf.cli import main

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")


@NO_GPU
@pytest.mark.parametrize("what", ["kernel", "decode"])
def test_no_gpu_is_one_clear_sentence(what, capsys):
    assert main(["bench", what]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_synthetic_artifact_has_the_cost_of_the_default_recipe():
    model = tiny_model("llama")
    artifact = synthetic_artifact(model.config)
    artifact.validate()
    assert artifact.config.key_scale == "weighted_search_both_ends"
    cache = OscarCache(model.config, artifact=artifact, sink_tokens=4, recent_tokens=8)
    model.generate(prompt(1, 40)[0], past_key_values=cache, max_new_tokens=2)
    assert cache.layers[0].history > 0


def test_bytes_count_codes_scales_and_windows():
    # 72 bytes per history token and KV head at D = G = 128: 32 + 32 of codes, 8 of scale and min.
    assert packed_bytes(Row(1, 1320)) == 8 * (1000 * 72 + 320 * 512)
    assert "32768" in ROWS[0].name


def test_tables():
    row = dict(
        shape="1 x 2", oscar_us=1.0, flash_us=4.0, cudnn_us=float("nan"), dequantize_sdpa_us=9.0, speedup=4.0, gb_per_s=10.0,
        share_of_copy=0.5, relative_error=1e-3,
    )  # fmt: skip
    assert "4.00x" in format_rows([row]) and format_rows([row]).count("\n") == 2
    step = dict(
        cache="oscar", batch=1, context=10, prefill_s=1.0, prefill_peak_gib=2.0, resident_gib=3.0, ms_per_token=4.0,
        launches_per_layer=5.0,
    )  # fmt: skip
    assert "| oscar | 1 | 10 |" in format_generation([step])


def test_unknown_shapes_are_refused():
    with pytest.raises(OscarError, match="qwen3-8b"):
        shaped_model("gpt-9", torch.device("cpu"))
    assert SHAPES["qwen3-8b"]["num_key_value_heads"] == 8


@pytest.mark.gpu
def test_kernel_bench_runs_and_is_correct():
    result = bench_kernel([Row(1, 4096)])
    assert result["rows"][0]["relative_error"] < 3e-3


@pytest.mark.gpu
def test_generation_bench_runs():
    model = tiny_model("qwen3", head_dim=128).to("cuda", torch.bfloat16)
    result = bench_generation(model, synthetic_artifact(model.config), [2048], 1, 4)
    assert [row["cache"] for row in result["rows"]] == ["dynamic", "oscar"]
