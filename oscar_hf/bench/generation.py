"""`oscar-hf bench decode`: whole models, prefill and decode, DynamicCache and other caches against OscarCache."""

import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StoppingCriteria, StoppingCriteriaList

from .. import compat
from ..artifact import Artifact
from ..cache import OscarCache
from ..config import OscarConfig
from ..constants import LayerConstants
from ..errors import OscarError
from .timing import machine

# Shapes of published models; weights are random and built on the device, for speed does not depend on their values.
SHAPES = {
    "qwen3-8b": dict(
        model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=262144,
    ),
    "qwen3-0.6b": dict(
        model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=262144,
    ),
}  # fmt: skip


def shaped_model(shape: str, device: torch.device):
    """A model of a preset shape with random BF16 weights, sdpa attention."""
    if shape not in SHAPES:
        raise OscarError(f"unknown shape {shape!r}: use one of {', '.join(SHAPES)}")
    config = AutoConfig.for_model(**SHAPES[shape], eos_token_id=None, bos_token_id=None, pad_token_id=None)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def synthetic_artifact(config) -> Artifact:
    """An artifact of recipe `default` without statistics: what it costs does not depend on the matrices."""
    config = compat.text_config(config)
    heads, dim = config.num_key_value_heads, config.head_dim
    free = LayerConstants.data_free("hadamard", "hadamard", dim, dim)

    def per_head(x):
        return x.expand(heads, dim, dim).contiguous()

    constants = LayerConstants(
        key_transform=per_head(free.key_transform),
        key_inverse=per_head(free.key_inverse),
        value_transform=per_head(free.value_transform),
        value_inverse=per_head(free.value_inverse),
        key_mean=torch.zeros(heads, dim),
        key_metric=per_head(torch.eye(dim)),
    )
    count = config.num_hidden_layers
    return Artifact(OscarConfig.from_recipe("default"), dict.fromkeys(range(count), constants), source="bench")


class _StepTimes(StoppingCriteria):
    """Wall-clock time after every generated token, the device synchronized."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores, **kwargs):
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _cache(kind: str, model, artifact: Artifact):
    return DynamicCache(config=model.config) if kind == "dynamic" else OscarCache(model.config, artifact=artifact)


def measure(model, kind: str, artifact: Artifact, context: int, batch: int, new_tokens: int) -> dict:
    """Prefill seconds, peak and resident bytes, and median milliseconds per token of generate() for one cache."""
    torch.cuda.empty_cache()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (batch, context), device=device, generator=generator)
    cache = _cache(kind, model, artifact)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.no_grad():
        model(input_ids=ids[:, :-1], logits_to_keep=1, **{compat.CACHE_ARGUMENT: cache})
    torch.cuda.synchronize()
    prefill = time.perf_counter() - begin
    prefill_peak = torch.cuda.max_memory_allocated() - before
    steps = _StepTimes()
    tokens = model.generate(
        ids, max_new_tokens=new_tokens, do_sample=False, stopping_criteria=StoppingCriteriaList([steps]),
        **{compat.CACHE_ARGUMENT: cache},
    )  # fmt: skip
    gaps = [b - a for a, b in zip(steps.times, steps.times[1:])]
    if kind == "oscar":
        cache.commit()
    result = {
        "cache": kind,
        "batch": batch,
        "context": context,
        "prefill_s": prefill,
        "prefill_peak_gib": prefill_peak / 2**30,
        "resident_gib": (torch.cuda.memory_allocated() - before) / 2**30,
        "ms_per_token": 1e3 * statistics.median(gaps),
        "launches_per_layer": _launches(model, cache, tokens[:, -1:]) / model.config.num_hidden_layers,
    }
    return result


def _launches(model, cache, token) -> float:
    """Kernels of one decode step of the whole model."""
    from torch.profiler import ProfilerActivity, profile

    with torch.no_grad(), profile(activities=[ProfilerActivity.CUDA]) as trace:
        model(input_ids=token, **{compat.CACHE_ARGUMENT: cache})
        torch.cuda.synchronize()
    return sum(event.count for event in trace.key_averages() if not event.key.startswith(("Memcpy", "Memset", "cuda")))


def bench_generation(model, artifact: Artifact, contexts: list[int], batch: int, new_tokens: int) -> dict:
    """`measure` for both caches at every context; returns {machine, rows}."""
    rows = []
    # A first, short pass compiles the kernels, so that no timing holds a compilation.
    for kind in ("dynamic", "oscar"):
        measure(model, kind, artifact, 1024, batch, 3)
    for context in contexts:
        for kind in ("dynamic", "oscar"):
            rows.append(measure(model, kind, artifact, context, batch, new_tokens))
            print(format_rows(rows[-1:], header=len(rows) == 1), flush=True)
    return {"machine": machine(), "rows": rows}


def format_rows(rows: list[dict], header: bool = True) -> str:
    """A Markdown table of bench_generation's rows."""
    lines = []
    if header:
        lines.append(
            "| cache | batch | context | prefill s | prefill peak GiB | resident GiB | ms per token | launches per layer |\n"
            "| --- | --- | --- | --- | --- | --- | --- | --- |"
        )
    for r in rows:
        lines.append(
            f"| {r['cache']} | {r['batch']} | {r['context']} | {r['prefill_s']:.2f} | {r['prefill_peak_gib']:.2f} "
            f"| {r['resident_gib']:.2f} | {r['ms_per_token']:.1f} | {r['launches_per_layer']:.0f} |"
        )
    return "\n".join(lines)
