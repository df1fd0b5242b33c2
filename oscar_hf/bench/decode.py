"""`oscar-hf bench decode`: whole models, generate() with each kind of cache: time, memory, launches, and the error it makes."""

import statistics
import time
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from ..artifact.artifact import Artifact
from ..cache.oscar_cache import OscarCache
from ..transformers_compat import model_config as compat
from ..transformers_compat.deferred_stop import can_defer_stop, deferred_stop
from ..transformers_compat.versions import CACHE_ARGUMENT
from .caches import STATIC, attention_error, filled, new_cache, settle
from .device import OUT_OF_MEMORY, Device, attempt, gib_since
from .largest_batch import largest
from .models import prompt_row, prompts
from .report import Column, table
from .timing import machine

# Tokens before the timed ones, at the same shapes: after the first, which is never compiled, come those that compile and that
# record CUDA graphs. They are given, so that all caches see the same and their logits can be compared.
WARM_UP = 8
# Tokens of the run in which launches are counted.
COUNTED = 4

COLUMNS: list[Column] = [
    ("cache", "cache", "s"),
    ("batch", "batch", "d"),
    ("context", "context", "d"),
    ("prefill s", "prefill_s", ".2f"),
    ("prefill peak GiB", "prefill_peak_gib", ".2f"),
    ("resident GiB", "resident_gib", ".2f"),
    ("ms per token", "ms_per_token", ".2f"),
    ("tokens per s", "tokens_per_s", ".0f"),
    ("ms, deferred stop", "deferred_ms", ".2f"),
    ("kernels per layer", "kernels_per_layer", ".0f"),
    ("launches per layer", "launches_per_layer", ".1f"),
    ("kernel error", "kernel_error", ".1e"),
    ("logit error", "logit_error", ".1e"),
]


@dataclass(frozen=True)
class Job:
    """What is measured. compile: let generate() compile static caches. synthetic: fill the cache with random keys and values
    in place of a prefill. prefill_chunk: tokens of a prompt per forward, None for all at once. count: count launches and check the
    attention kernel, too."""

    model: torch.nn.Module
    artifact: Artifact
    tokenizer: object = None
    batch: int = 1
    new_tokens: int = 32
    compile: bool = False
    synthetic: bool = False
    prefill_chunk: int | None = None
    count: bool = True

    @property
    def device(self) -> Device:
        """Where the model is."""
        return Device(next(self.model.parameters()).device)


@torch.no_grad()
def prefill(job: Job, cache, ids: Tensor) -> Tensor:
    """Run a prompt, or a further turn, [batch, T] into a cache; returns the logits of its last token."""
    for part in ids.split(job.prefill_chunk or ids.shape[1], 1):
        output = job.model(input_ids=part, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    return output.logits[:, -1]


def measure(job: Job, kind: str, context: int, reference: Tensor | None = None) -> tuple[dict, Tensor]:
    """One row of the table, and the first prompt's logits [WARM_UP, V] of the warm-up's tokens, float32 on the CPU.

    Its kernel_error is that of attention on packed data; its logit_error is all that separates it from `reference`, logits of
    DynamicCache: quantization, too, which a model with random weights blows up.
    The cache holds context - 1 tokens when generate() begins with the last one. Resident and peak count what this run adds
    to the model's own bytes.
    """
    device, model = job.device, job.model
    device.clear()
    ids = prompts(prompt_row(model, context + WARM_UP, job.tokenizer), job.batch)
    given, ids = Given(ids[:, context:]), ids[:, :context]
    room = context + WARM_UP + 2 * job.new_tokens + COUNTED + 1
    row = {"cache": kind, "batch": job.batch, "context": context}
    before = device.allocated()
    device.reset_peak()
    if job.synthetic:
        cache = filled(kind, model, job.artifact, context - 1, job.batch, room)
    else:
        begin = device.now()
        cache = new_cache(kind, model, job.artifact, room)
        prefill(job, cache, ids[:, :-1])
        settle(cache)
        row |= {"prefill_s": device.now() - begin, "prefill_peak_gib": gib_since(before, device.peak())}
    row["resident_gib"] = gib_since(before, device.allocated())
    tokens = _generate(job, ids, cache, WARM_UP, logits_processor=LogitsProcessorList([given]))
    logits = torch.stack(given.logits)
    device.reset_peak()
    tokens, row["step_ms"] = _timed(job, tokens, cache)
    row["decode_peak_gib"] = gib_since(before, device.peak())
    row["ms_per_token"] = statistics.median(row["step_ms"])
    row["tokens_per_s"] = 1e3 * job.batch / row["ms_per_token"]
    row["deferred_ms"] = None
    if can_defer_stop(cache, device.device):
        with deferred_stop():
            tokens, row["deferred_step_ms"] = _timed(job, tokens, cache)
        row["deferred_ms"] = statistics.median(row["deferred_step_ms"])
    if job.count:
        counts, problem = attempt(device, _launches, job, tokens, cache)
        row |= counts or {"launches_problem": problem}
    if reference is not None:
        row |= compare(logits, reference)
    if job.count and isinstance(cache, OscarCache) and cache.oscar_layers:
        heads = compat.text_config(model.config).num_attention_heads
        row["kernel_error"], problem = attempt(device, attention_error, cache, heads)
        row |= {"kernel_problem": problem} if problem else {}
    return row, logits


def _timed(job: Job, ids: Tensor, cache) -> tuple[Tensor, list[float]]:
    """The tokens after job.new_tokens more, and the milliseconds of each step but the first."""
    steps = StepTimes()
    tokens = _generate(job, ids, cache, job.new_tokens, steps)
    return tokens, [round(1e3 * (b - a), 3) for a, b in zip(steps.times, steps.times[1:])]


def _generate(job: Job, ids: Tensor, cache, new_tokens: int, *criteria: StoppingCriteria, **options):
    """Greedy generate() on top of a cache that holds all but the last of `ids`."""
    return job.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
        disable_compile=not job.compile, stopping_criteria=StoppingCriteriaList(criteria),
        **{CACHE_ARGUMENT: cache}, **options,
    )  # fmt: skip


def compare(logits: Tensor, reference: Tensor) -> dict[str, float]:
    """How far logits [N, V] are from others: ||x - ref|| / ||ref||, mean KL divergence from ref, share of equal best tokens."""
    mine, theirs = logits.log_softmax(-1), reference.log_softmax(-1)
    return {
        "logit_error": ((logits - reference).norm() / reference.norm()).item(),
        "kl": F.kl_div(mine, theirs, reduction="batchmean", log_target=True).item(),
        "agreement": (logits.argmax(-1) == reference.argmax(-1)).float().mean().item(),
    }


class Given(LogitsProcessor):
    """Makes generate() choose the given tokens [B, N], and keeps the first row's logits, float32 on the CPU."""

    def __init__(self, tokens: Tensor):
        self.tokens, self.logits = tokens, []

    def __call__(self, input_ids, scores):
        chosen = self.tokens[:, len(self.logits), None]
        self.logits.append(scores[0].float().cpu())
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class StepTimes(StoppingCriteria):
    """The host's time at the same place of every step of generate(), which waits for the device once a step by itself."""

    def __init__(self):
        self.times, self.go_on = [], None

    def __call__(self, input_ids, scores, **kwargs):
        self.times.append(time.perf_counter())
        if self.go_on is None:
            self.go_on = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        return self.go_on


class ProfiledStep(StoppingCriteria):
    """Profiles the step that follows the second token, the model's forward and generate()'s own work."""

    def __init__(self):
        from torch.profiler import ProfilerActivity, profile

        self.calls, self.profile = 0, profile(activities=[ProfilerActivity.CUDA], acc_events=True)

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == 2:
            torch.cuda.synchronize()
            self.profile.start()
        elif self.calls == 3:
            torch.cuda.synchronize()
            self.profile.stop()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _launches(job: Job, tokens: Tensor, cache) -> dict[str, float | None]:
    """Kernels that one step of generate() runs on the GPU, and launches by the host (a CUDA graph is one), per layer."""
    if not job.device.is_cuda:
        return {"kernels_per_layer": None, "launches_per_layer": None}
    step = ProfiledStep()
    _generate(job, tokens, cache, COUNTED, step)
    kernels, launches = count_launches(step.profile.events())
    layers = compat.text_config(job.model.config).num_hidden_layers
    # Whether the host's calls are recorded depends on the profiler's version.
    return {"kernels_per_layer": kernels / layers, "launches_per_layer": launches / layers if launches else None}


def count_launches(events) -> tuple[int, int]:
    """(kernels on the device, launches by the host) among a profile's events."""
    kernels = launches = 0
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels += not event.name.startswith(("Memcpy", "Memset", "cuda", "cuLaunch", "ProfilerStep"))
        else:
            launches += event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch"))
    return kernels, launches


def forget_compiled(model) -> None:
    """Drop what generate() compiled: the next row compiles for its own shapes, and the graphs' memory is given back."""
    torch.compiler.reset()
    if hasattr(model, "_compiled_call"):
        del model._compiled_call


def bench_decode(job: Job, kinds: list[str], contexts: list[int], find_batch: bool = False) -> dict:
    """`measure` for every kind of cache and context; returns {machine, compile, synthetic_prefill, find_batch, rows}.

    find_batch: take the largest batch that fits in place of the job's. What fails, for lack of memory or otherwise, is a row
    with its `problem`. A row's logits are compared with DynamicCache's of the same context, where that ran before.
    """
    rows = []
    # A short pass compiles the package's kernels, so that no prefill's time holds a compilation; steps have a warm-up anyway.
    warm = replace(job, batch=1, new_tokens=2, compile=False, count=False)
    for kind in kinds if not job.synthetic else []:
        attempt(job.device, measure, warm, kind, min(1024, *contexts))
    for context in contexts:
        reference = None
        for kind in kinds:
            row, logits = _row(job, kind, context, reference, find_batch)
            if kind == "dynamic":
                reference = logits
            rows.append(row)
            print(format_rows([row], header=len(rows) == 1), flush=True)
    return {
        "machine": machine(job.device.device),
        "compile": job.compile,
        "synthetic_prefill": job.synthetic,
        "find_batch": find_batch,
        "rows": rows,
    }


def _row(job: Job, kind: str, context: int, reference: Tensor | None, find_batch: bool) -> tuple[dict, Tensor | None]:
    """One row, or what stopped it, and its logits, or those of no row."""
    job = replace(job, compile=job.compile and kind in STATIC)
    batch, problem = job.batch, ""
    if find_batch:
        batch, problem = largest_batch(job, kind, context)
    while batch and not problem:
        result, problem = attempt(job.device, measure, replace(job, batch=batch), kind, context, reference)
        if job.compile:
            forget_compiled(job.model)
            job.device.clear()
        if not problem:
            return result
        if find_batch and problem == OUT_OF_MEMORY:
            # Compiled, it needs a little more than when its size was tried.
            batch, problem = batch - max(1, batch // 16), ""
    return {"cache": kind, "batch": batch, "context": context, "problem": problem or OUT_OF_MEMORY}, None


def largest_batch(job: Job, kind: str, context: int) -> tuple[int, str]:
    """(largest batch that fits, within a sixteenth, or 0; what went wrong other than a lack of memory).

    Each size is tried with a few tokens of generate(), not compiled.
    """
    trial = replace(job, new_tokens=2, compile=False, count=False)
    failed = []

    def fits(batch: int) -> bool:
        _, problem = attempt(job.device, measure, replace(trial, batch=batch), kind, context)
        if problem and problem != OUT_OF_MEMORY:
            failed.append(problem)
        return not problem

    batch = largest(fits)
    return (0, failed[0]) if failed else (batch, "")


def format_rows(rows: list[dict], header: bool = True) -> str:
    """A Markdown table of bench_decode's rows."""
    return table(rows, COLUMNS, header)
