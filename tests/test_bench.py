"""The bench commands: all of their logic on a CPU with tiny models; with a GPU one small run of each."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from tiny_models import prompt, tiny_model

from oscar_hf import OscarCache, OscarConfig, OscarError
from oscar_hf.bench import caches, command, models, plot, prefill
from oscar_hf.bench import decode as generation
from oscar_hf.bench import decode_kernel as kernel
from oscar_hf.bench.decode import WARM_UP, Job, bench_decode, compare, count_launches, measure
from oscar_hf.bench.decode_kernel import ROWS, Row, bench_kernel, choose_rows, packed_bytes
from oscar_hf.bench.device import OUT_OF_MEMORY, Device, attempt, failed, problem_of
from oscar_hf.bench.largest_batch import largest
from oscar_hf.bench.models import SHAPES, prompt_row, prompts, shaped_model, synthetic_artifact
from oscar_hf.bench.report import table, write_json
from oscar_hf.bench.timing import machine
from oscar_hf.cli.main import main
from oscar_hf.kernels.decode.reference import decode_attention_reference

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
CPU = torch.device("cpu")
# Beyond the windows of 64 and 256 tokens, so that something is packed.
CONTEXT = 360


@pytest.fixture(scope="module")
def model():
    made = tiny_model("qwen3")
    models.plain_generation(made)
    return made


@pytest.fixture
def job(model):
    return Job(model, synthetic_artifact(model.config), new_tokens=4)


# ------------------------------------------------------------------------------------------------------ command line
@NO_GPU
@pytest.mark.parametrize("what", ["kernel", "decode", "prefill"])
def test_no_gpu_is_one_clear_sentence(what, capsys):
    assert main(["bench", what]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["kernel", "--rows", "77"], "names no row"),
        (["kernel", "--plot", "out.xyz"], "must end with .png"),
        (["decode", "--plot", "no/such/folder/out.png"], "cannot write"),
        (["decode", "--json", "no/such/folder/out.json"], "cannot write"),
        (["decode", "--caches", "dynamic", "magic"], "unknown caches magic"),
        (["decode", "--gguf-file", "x.gguf"], "--model"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_run(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--new-tokens", "2"], ["--shape", "a", "--model", "b"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "decode", *arguments])
    capsys.readouterr()


@pytest.mark.parametrize("what", ["kernel", "decode", "prefill"])
def test_without_matplotlib_a_plot_is_refused_before_the_run(what, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert main(["bench", what, "--plot", "out.png"]) == 2
    assert "oscar-hf[bench]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "what, options, keys",
    [
        ("decode", ["--caches", "dynamic", "oscar", "--new-tokens", "3"], {"ms_per_token", "logit_error", "prefill_s"}),
        ("decode", ["--synthetic-prefill", "--caches", "static", "oscar", "--new-tokens", "3"], {"ms_per_token"}),
        ("prefill", ["--turns", "5", "--repeats", "1"], {"seconds", "logit_error"}),
    ],
)
def test_a_whole_command(what, options, keys, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("oscar_hf.bench.timing.require_cuda", lambda device: CPU)
    monkeypatch.setattr(models, "shaped_model", lambda shape, device: model)
    monkeypatch.setattr(command, "DEFAULT_TURNS", [5])
    files = tmp_path / "out.json", tmp_path / "out.png"
    arguments = [*options, "--context", "40", "80", "--json", str(files[0]), "--plot", str(files[1])]
    assert main(["bench", what, *arguments]) == 0
    result = json.loads(files[0].read_text())
    assert {"gpu", "torch", "transformers", "date"} <= set(result["machine"])
    assert len(result["rows"]) == (4 if what == "decode" else 8)
    assert keys <= set(result["rows"][-1])
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("\n| --- |") == 1


def test_a_model_by_name_with_its_artifact(model, tmp_path, monkeypatch):
    monkeypatch.setattr("oscar_hf.bench.timing.require_cuda", lambda device: CPU)
    synthetic_artifact(model.config).save(tmp_path / "artifact")
    loaded = []

    def load(name, **options):
        loaded.append((name, options))
        return model, words

    def words(text, **options):
        return {"input_ids": torch.tensor([[ord(letter) % 90 + 4 for letter in text[:30]]])}

    monkeypatch.setattr("oscar_hf.cli.main.load_model", load)
    arguments = ["--model", "some/model", "--gguf-file", "f.gguf", "--artifact", str(tmp_path / "artifact")]
    arguments += ["--caches", "dynamic", "oscar", "--context", "40", "--new-tokens", "3", "--batch", "2"]
    assert main(["bench", "decode", *arguments]) == 0
    assert loaded == [("some/model", {"gguf_file": "f.gguf", "device": "cpu"})]


def test_a_broken_row_ends_with_code_1_and_a_lack_of_memory_does_not(model, monkeypatch, capsys):
    monkeypatch.setattr("oscar_hf.bench.timing.require_cuda", lambda device: CPU)
    monkeypatch.setattr(models, "shaped_model", lambda shape, device: model)
    good, error = generation.new_cache, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    def broken(kind, *args):
        if kind == "static":
            raise error
        return good(kind, *args)

    monkeypatch.setattr(generation, "new_cache", broken)
    arguments = ["bench", "decode", "--context", "40", "--new-tokens", "3", "--caches", "dynamic", "static", "oscar"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"| static | 1 | 40 | {OUT_OF_MEMORY} | - |" in out and "| oscar | 1 | 40 | 0" in out
    error = ValueError("what a pity\nand more")
    assert main(arguments) == 1
    assert "ValueError: what a pity |" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------ models
def test_synthetic_artifact_has_the_cost_of_the_default_recipe():
    model = tiny_model("llama")
    artifact = synthetic_artifact(model.config)
    artifact.validate()
    assert artifact.config == OscarConfig.from_recipe("default")
    cache = OscarCache(model.config, artifact=artifact, sink_tokens=4, recent_tokens=8)
    model.generate(prompt(1, 40)[0], past_key_values=cache, max_new_tokens=2)
    assert cache.layers[0].store.history > 0


def test_unknown_shapes_are_refused():
    with pytest.raises(OscarError, match="qwen3-8b"):
        shaped_model("gpt-9", CPU)
    assert SHAPES["qwen3-8b"]["num_key_value_heads"] == 8


def test_shapes_are_models(monkeypatch):
    small = dict(SHAPES["qwen3-0.6b"], hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=100)
    monkeypatch.setitem(SHAPES, "small", small)
    model = shaped_model("small", CPU)
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "sdpa"
    assert models.states_shape(model.config) == (8, 128)


def test_the_first_prompt_does_not_depend_on_the_batch(model):
    row = prompt_row(model, 50)
    assert row.shape == (50,) and row.min() >= 0 and row.max() < model.config.vocab_size
    assert torch.equal(prompts(row, 3)[0], prompts(row, 1)[0])
    assert len({tuple(r.tolist()) for r in prompts(row, 3)}) == 3


# ------------------------------------------------------------------------------------------------------ caches
def test_quantized_stands_for_what_is_installed(monkeypatch):
    monkeypatch.setattr(caches, "QUANTIZED", {"quantized-quanto": lambda: True, "quantized-hqq": lambda: False})
    kinds, note = caches.choose(["dynamic", "quantized", "dynamic", "oscar"])
    assert kinds == ["dynamic", "quantized-quanto", "oscar"]
    assert note == "left out, not installed: quantized-hqq"
    with pytest.raises(OscarError, match="no cache is left"):
        caches.choose(["quantized-hqq"])


def test_static_length():
    assert [caches.static_length(n) for n in (1, 128, 129)] == [128, 128, 256]


@pytest.mark.parametrize("kind", ["dynamic", "static", "oscar", "oscar-static"])
@pytest.mark.parametrize("batch", [1, 3])
def test_filled_caches_hold_the_same_tokens_in_every_row(kind, batch, job):
    cache = caches.filled(kind, job.model, job.artifact, CONTEXT, batch, CONTEXT + 8)
    assert int(cache.get_seq_length()) == CONTEXT
    exact = caches.filled("dynamic", job.model, job.artifact, CONTEXT, 1, CONTEXT)
    for layer, expected in zip(cache.layers, exact.layers):
        ours = kind.startswith("oscar")
        keys = layer.store.dense("k") if ours else layer.keys[:, :, :CONTEXT]
        assert keys.shape[0] == batch and all(torch.equal(row, keys[0]) for row in keys)
        shown = slice(None, 64) if ours else slice(None)
        assert torch.equal(keys[0, :, shown], expected.keys[0, :, shown])
        if ours:
            assert layer.store.history == CONTEXT - 64 - 255 - 32
    assert not torch.equal(exact.layers[0].keys, exact.layers[1].keys)


# ------------------------------------------------------------------------------------------------------ decode
@pytest.mark.parametrize("synthetic", [False, True])
@pytest.mark.parametrize("chunk", [None, 100])
def test_decode_rows_hold_time_and_error(job, synthetic, chunk, capsys):
    job = replace(job, synthetic=synthetic, prefill_chunk=chunk, batch=2)
    result = bench_decode(job, ["dynamic", "static", "oscar", "oscar-static"], [CONTEXT])
    dynamic, static, oscar, fixed = result["rows"]
    for row in result["rows"]:
        assert row["ms_per_token"] > 0 and len(row["step_ms"]) == 3 and not failed(row)
        assert ("prefill_s" in row) != synthetic and row["resident_gib"] is None
    assert static["logit_error"] < 1e-5 < oscar["logit_error"] < 0.5 and "logit_error" not in dynamic
    assert static["agreement"] == 1 and oscar["kl"] > 0
    assert oscar["kernel_error"] < 1e-5 and fixed["kernel_error"] < 1e-5 and "kernel_error" not in static
    assert fixed["logit_error"] == pytest.approx(oscar["logit_error"], rel=1e-2)
    assert "| oscar | 2 | 360 |" in capsys.readouterr().out


def test_logits_are_those_of_the_given_tokens(job):
    _, logits = measure(replace(job, batch=2), "dynamic", 40)
    with torch.no_grad():
        expected = job.model(input_ids=prompt_row(job.model, 40 + WARM_UP)[None]).logits[0, 39:-1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3)
    assert compare(logits, expected)["logit_error"] < 1e-4 and compare(logits, expected)["agreement"] == 1


def test_static_caches_are_compiled_only_on_request(job, monkeypatch):
    asked = []
    real = type(job.model).generate

    def spy(model, *args, **options):
        asked.append(options["disable_compile"])
        return real(model, *args, **options)

    monkeypatch.setattr(type(job.model), "generate", spy)
    job = replace(job, compile=True)
    bench_decode(job, ["dynamic", "static"], [40])
    assert asked[-2:] == [False] * 2 and set(asked[:-2]) == {True}
    monkeypatch.setattr(generation, "forget_compiled", lambda model: asked.append("forgotten"))
    bench_decode(job, ["static"], [40])
    assert asked[-3:] == [False, False, "forgotten"]


def test_forget_compiled(model):
    model._compiled_call = object()
    generation.forget_compiled(model)
    assert not hasattr(model, "_compiled_call")
    generation.forget_compiled(model)


def test_launches_are_counted_by_where_they_happen():
    class Event:
        def __init__(self, name, on_gpu):
            self.name = name
            self.device_type = getattr(torch.autograd.DeviceType, "CUDA" if on_gpu else "CPU")

    on_gpu = ["kernel", "_split_kernel", "Memcpy HtoD", "Memset (Device)"]
    host = ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaStreamSynchronize", "cudaMemcpyAsync"]
    events = [Event(name, True) for name in on_gpu] + [Event(name, False) for name in host]
    assert count_launches(events) == (2, 3)


# ------------------------------------------------------------------------------------------------------ largest batch
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 16, 31, 33, 100, 1000])
def test_the_largest_that_fits(limit):
    asked = []

    def fits(n):
        asked.append(n)
        return n <= limit

    found = largest(fits, most=512)
    assert found <= min(limit, 512) <= found + max(1, found // 16) - (found < 16)
    assert len(asked) == len(set(asked)) <= 16


def test_a_batch_that_fits_is_searched_for_and_may_shrink_in_the_end(job, monkeypatch, capsys):
    calls = []

    def fake(job, kind, context, reference=None):
        calls.append(job)
        if job.batch > (24 if job.new_tokens == 2 else 23):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"cache": kind, "batch": job.batch, "context": context}, torch.zeros(3)

    monkeypatch.setattr(generation, "measure", fake)
    result = bench_decode(job, ["dynamic"], [40], find_batch=True)
    assert result["rows"][0]["batch"] == 23 and result["find_batch"]
    assert not any(trial.compile or trial.count for trial in calls if trial.new_tokens == 2)


def test_no_batch_fits_or_something_breaks(job, monkeypatch, capsys):
    error = torch.OutOfMemoryError("CUDA out of memory")

    def fake(*args, **kwargs):
        raise error

    monkeypatch.setattr(generation, "measure", fake)
    row = bench_decode(job, ["dynamic"], [40], find_batch=True)["rows"][0]
    assert row == {"cache": "dynamic", "batch": 0, "context": 40, "problem": OUT_OF_MEMORY} and not failed(row)
    error = ValueError("broken")
    row = bench_decode(job, ["dynamic"], [40], find_batch=True)["rows"][0]
    assert row["problem"] == "ValueError: broken" and failed(row)


# ------------------------------------------------------------------------------------------------------ prefill
@pytest.mark.parametrize("synthetic", [False, True])
def test_prefill_rows(job, synthetic, capsys):
    job = replace(job, synthetic=synthetic)
    result = prefill.bench_prefill(job, ["dynamic", "oscar"], [CONTEXT], [20], repeats=2)
    assert [(row["history"], row["new_tokens"]) for row in result["rows"]] == [(0, CONTEXT)] * 2 + [(CONTEXT, 20)] * 2
    first, turn = result["rows"][1], result["rows"][3]
    # Attention over a prompt is exact; a turn looks at packed tokens.
    assert first["logit_error"] < 1e-5 < turn["logit_error"] < 0.5
    assert all(row["seconds"] > 0 and len(row["all_seconds"]) == 2 for row in result["rows"])
    assert "| oscar | 1 | 360 | 20 |" in capsys.readouterr().out


def test_prefill_problems_are_rows(job, monkeypatch, capsys):
    monkeypatch.setattr(prefill, "measure", lambda *args: 1 / 0)
    rows = prefill.bench_prefill(job, ["dynamic", "oscar"], [40], [], 1)["rows"]
    assert [row["problem"] for row in rows] == ["ZeroDivisionError: division by zero"] * 2


# ------------------------------------------------------------------------------------------------------ kernel
def test_bytes_count_codes_scales_and_windows():
    # 72 bytes per history token and KV head at D = G = 128 in the former storage: 32 + 32 of codes, 8 of scale and min.
    assert packed_bytes(Row(1, 1320, former=True)) == 8 * (1000 * 72 + 320 * 512)
    # No min, and a center of 256 bytes for each 128 tokens.
    assert packed_bytes(Row(1, 1320)) == 8 * (1000 * 68 + 8 * 256 + 320 * 512)
    assert "32768" in ROWS[0].name


def test_the_kernels_error_is_judged_row_by_row(monkeypatch):
    query, store = kernel.random_store(Row(3, 400, 4, 2, 64, 64), 0, "cpu")
    exact = decode_attention_reference(query, store)
    monkeypatch.setattr(kernel, "decode_attention", lambda query, store: exact.float())
    assert 0 < kernel.relative_error(query, store) < 1e-6
    monkeypatch.setattr(kernel, "decode_attention", lambda query, store: (1.01 * exact).float())
    assert kernel.relative_error(query, store) == pytest.approx(0.01, rel=1e-3)


def test_rows_are_chosen_by_number_range_and_name():
    assert choose_rows(["2"]) == [ROWS[1]]
    assert choose_rows(["1-4"]) == ROWS[:4]
    assert choose_rows(["4", "1-2", "1"]) == [ROWS[3], ROWS[0], ROWS[1]]
    assert choose_rows(["d 64"]) == [ROWS[4]] and choose_rows(["8 x 102400"]) == [ROWS[2], ROWS[-1]]
    for wrong in ("0", "99", "x-y", "D 512"):
        with pytest.raises(OscarError, match="names no row"):
            choose_rows([wrong])


# ------------------------------------------------------------------------------------------------------ report
def test_tables():
    row = dict(
        shape="1 x 2", oscar_us=1.0, flash_us=4.0, cudnn_us=None, dequantize_sdpa_us=9.0, speedup=4.0, gb_per_s=10.0,
        share_of_copy=0.5, relative_error=1e-3,
    )  # fmt: skip
    text = kernel.format_rows([row])
    assert "4.00x" in text and "| - |" in text and text.count("\n") == 2
    text = table([{"a": float("nan"), "problem": "broke"}], [("A", "a", "d"), ("B", "b", "d")], header=False)
    assert text == "| broke | - |"


def test_json_has_no_nan(tmp_path):
    write_json({"rows": [{"x": float("nan"), "y": (1, 2.5, "z", float("inf"))}]}, str(tmp_path / "x.json"))
    assert json.loads((tmp_path / "x.json").read_text()) == {"rows": [{"x": None, "y": [1, 2.5, "z", None]}]}


def test_machine_names_no_computer():
    assert machine(CPU)["gpu"] == "none"
    assert set(machine()) == {
        "gpu", "gpu_memory_gib", "cuda", "torch", "triton", "transformers", "oscar_hf", "python", "date",
    }  # fmt: skip


def test_plots(tmp_path):
    info = machine(CPU)
    rows = [
        dict(
            cache="dynamic",
            context=c,
            batch=4,
            ms_per_token=c / 10,
            tokens_per_s=9.0,
            history=c,
            new_tokens=5,
            seconds=1.0,
        )
        for c in (10, 20)
    ]
    rows.append(dict(cache="oscar", context=10, history=0, new_tokens=5, problem=OUT_OF_MEMORY))
    for number, found in enumerate((False, True)):
        plot.plot_decode({"machine": info, "rows": rows, "find_batch": found}, str(tmp_path / f"{number}.png"))
    plot.plot_prefill({"machine": info, "rows": rows}, str(tmp_path / "2.png"))
    bars = [{"shape": "1 x 2, Hq 3", "oscar_us": 5.0, "flash_us": None}, {"shape": "2 x 2, Hq 3", "problem": "broke"}]
    plot.plot_kernel({"machine": info, "rows": bars}, str(tmp_path / "3.svg"))
    assert len(list(tmp_path.iterdir())) == 4


# ------------------------------------------------------------------------------------------------------ device
def test_attempts():
    device = Device(CPU)
    assert attempt(device, lambda x: x + 1, 2) == (3, "")
    assert attempt(device, lambda: 1 / 0) == (None, "ZeroDivisionError: division by zero")
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ):
        assert problem_of(error) == OUT_OF_MEMORY
    assert (device.allocated(), device.peak()) == (None, None)


# ------------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.gpu
def test_kernel_bench_runs_and_is_correct():
    result = bench_kernel([Row(1, 4096)])
    assert result["rows"][0]["relative_error"] < 3e-3 and not result["rows"][0]["problems"]


@pytest.mark.gpu
@pytest.mark.parametrize("synthetic", [False, True])
def test_generation_bench_runs(synthetic):
    model = tiny_model("qwen3", head_dim=128).to("cuda", torch.bfloat16)
    models.plain_generation(model)
    job = Job(model, synthetic_artifact(model.config), new_tokens=4, synthetic=synthetic)
    rows = bench_decode(job, ["dynamic", "static", "oscar", "oscar-static"], [2048])["rows"]
    assert not any(row.get("problem") for row in rows)
    assert all(row["kernels_per_layer"] > 0 and row["resident_gib"] > 0 for row in rows)
    assert rows[2]["kernel_error"] < 5e-3 and rows[3]["kernel_error"] < 5e-3
    assert rows[2]["resident_gib"] < rows[0]["resident_gib"]
