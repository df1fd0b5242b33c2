"""`oscar-hf bench prefill`: time and peak memory of a prompt on an empty cache, and of a further turn on a history."""

import statistics
from dataclasses import replace

from torch import Tensor

from .caches import filled, new_cache, settle
from .decode import Job, compare, prefill
from .device import attempt, gib_since
from .models import prompt_row, prompts
from .report import Column, table
from .timing import machine

COLUMNS: list[Column] = [
    ("cache", "cache", "s"),
    ("batch", "batch", "d"),
    ("history", "history", "d"),
    ("new tokens", "new_tokens", "d"),
    ("s", "seconds", ".3f"),
    ("tokens per s", "tokens_per_s", ".0f"),
    ("peak GiB", "peak_gib", ".2f"),
    ("resident GiB", "resident_gib", ".2f"),
    ("logit error", "logit_error", ".1e"),
]


def measure(
    job: Job, kind: str, history: int, new: int, repeats: int, reference: Tensor | None = None
) -> tuple[dict, Tensor]:
    """One row, the median time of `repeats` runs, and the first prompt's logits [1, V] of the last token, float32 on the CPU.

    `new` tokens are run into a cache that holds `history` tokens, packing included. Peak (during the run) and resident count
    what is there beyond the model's own bytes, the history as well.
    """
    device = job.device
    ids = prompts(prompt_row(job.model, history + new, job.tokenizer), job.batch)
    seconds = []
    for _ in range(repeats):
        # The last run's cache goes first: two at once would be counted, or not fit.
        cache = None
        device.clear()
        before = device.allocated()
        cache = _with_history(job, kind, ids[:, :history], history + new)
        device.reset_peak()
        begin = device.now()
        logits = prefill(job, cache, ids[:, history:])
        settle(cache)
        seconds.append(device.now() - begin)
        peak, resident = gib_since(before, device.peak()), gib_since(before, device.allocated())
    row = {
        "cache": kind,
        "batch": job.batch,
        "history": history,
        "new_tokens": new,
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "peak_gib": peak,
        "resident_gib": resident,
    }
    row["tokens_per_s"] = job.batch * new / row["seconds"]
    logits = logits[:1].float().cpu()
    if reference is not None:
        row |= compare(logits, reference)
    return row, logits


def _with_history(job: Job, kind: str, ids: Tensor, room: int):
    if not ids.shape[1]:
        return new_cache(kind, job.model, job.artifact, room)
    if job.synthetic:
        return filled(kind, job.model, job.artifact, ids.shape[1], job.batch, room)
    cache = new_cache(kind, job.model, job.artifact, room)
    prefill(job, cache, ids)
    settle(cache)
    return cache


def bench_prefill(job: Job, kinds: list[str], contexts: list[int], turns: list[int], repeats: int = 3) -> dict:
    """`measure` a prompt of every context, and every turn on top of it; returns {machine, synthetic_prefill, rows}.

    What fails is a row with its `problem`. Logits are compared with DynamicCache's, where that ran before.
    """
    rows = []
    # A short pass compiles the package's kernels, so that no time holds a compilation.
    short = min(1024, *contexts)
    for kind in kinds:
        attempt(job.device, measure, replace(job, batch=1), kind, short, short, 1)
    for context in contexts:
        for history, new in [(0, context)] + [(context, turn) for turn in turns]:
            reference = None
            for kind in kinds:
                result, problem = attempt(job.device, measure, job, kind, history, new, repeats, reference)
                row, logits = result or (
                    {"cache": kind, "batch": job.batch, "history": history, "new_tokens": new, "problem": problem},
                    None,
                )
                if kind == "dynamic":
                    reference = logits
                rows.append(row)
                print(format_rows([row], header=len(rows) == 1), flush=True)
    return {"machine": machine(job.device.device), "synthetic_prefill": job.synthetic, "rows": rows}


def format_rows(rows: list[dict], header: bool = True) -> str:
    """A Markdown table of bench_prefill's rows."""
    return table(rows, COLUMNS, header)
