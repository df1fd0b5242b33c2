"""Compile the Triton kernels for a GPU that need not be here: `python -m tests.compile_kernels --arch 90`.

Triton's interpreter, in which the tests run without a GPU, takes much that the compiler refuses. Here the functions that launch
kernels are called with tensors without data, and each launch is compiled for the GPU and not run. A line for each kernel: registers
of a thread, spills (32-bit words of a thread in local memory, as Triton's own `n_spills`), bytes of shared memory, seconds of
compiling. The exit status is 1 if one does not compile, or needs more shared memory than the GPU has.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"
# Triton's cache does not see that a constant of a module has changed.
os.environ["TRITON_ALWAYS_COMPILE"] = "1"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from oscar_hf.kernels.append import append_rows_triton
from oscar_hf.kernels.decode import DecodeStore, decode_attention, decode_problem, mask_facts
from oscar_hf.kernels.decode import mask_facts as mask_module
from oscar_hf.kernels.decode import tuning as tuning_module
from oscar_hf.kernels.decode_step import COUNTERS, encode_ahead_triton, place_tokens_triton
from oscar_hf.kernels.dequantize import dequantize_rows_triton
from oscar_hf.quantization.kv_side import Side, SideFormat
from oscar_hf.quantization.quantizer import ScaleRule

HEADS, CAPACITY, SINK, RECENT, RING = 8, 4096, 64, 256, 287
GROUPS = {64: 64, 96: 96, 128: 128, 256: 128}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
SYMMETRIC_RULES = ("feedback", "unbiased")
RULES = (
    *SYMMETRIC_RULES, "percentile(none)", "percentile(0.96)", "search", "weighted_search", "weighted_search_both_ends",
)  # fmt: skip
CENTERS = ("block", "mean", "none")
# KiB of shared memory that a program can have.
SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}


def tensor(*shape, dtype=FP32):
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def side(dim, rule, dtype=BF16, batch=1, center="none", symmetric=None, group=None, per_head=True, transform=True):
    """Keys or values of a layer with full stores; symmetric: None for rules that must be."""
    rule = ScaleRule.parse(rule)
    symmetric = rule.needs_symmetric if symmetric is None else symmetric
    block = 128 if center == "block" else 0
    form = SideFormat(dim, group or GROUPS[dim], symmetric, rule, not transform, block, center == "mean")
    matrix = tensor(HEADS, dim, dim) if per_head else tensor(dim, dim)
    return Side(
        form, form.new_rows(batch, HEADS, "meta", CAPACITY), matrix if transform else None, matrix.mT if transform else None,
        tensor(HEADS, dim) if center == "mean" else None, tensor(HEADS, dim, dim) if rule.needs_metric else None,
        tensor(batch, HEADS, SINK, dim, dtype=dtype), tensor(batch, HEADS, RING, dim, dtype=dtype),
    )  # fmt: skip


def append_cases():
    """Every rule with every head dim, a token and a prompt; the other choices take turns."""
    for i, (rule, dim, tokens) in enumerate(itertools.product(RULES, GROUPS, (1, 1000))):
        dtype, center, symmetric = DTYPES[i % 3], CENTERS[i // 2 % 3], rule in SYMMETRIC_RULES or i // 4 % 2 == 0
        group = GROUPS[dim] if i % 5 < 3 else 32
        made = side(dim, rule, dtype, 1, center, symmetric, group, per_head=i % 2 == 0, transform=i % 11 > 0)
        x = tensor(1, HEADS, tokens, dim, dtype=dtype)
        text = f"{rule} D {dim} groups of {group} center {center} {tokens} tokens {name_of(dtype)}"
        yield text, lambda a=(made, 0, x): append_rows_triton(*a)


def step_cases():
    """Every rule of keys with every head dim, lengths on the host, on the device, and encoding ahead in turn; the default all."""
    ways = ("host", "device", "ahead")
    for i, (rule, dim, way) in enumerate(itertools.product(RULES, GROUPS, ways)):
        if rule != "feedback" and ways[(i // 3 + i // 12) % 3] != way:
            continue
        dtype, starts = DTYPES[i % 2], i // 3 % 2 == 0
        keys = side(dim, rule, dtype, 2, CENTERS[i // 12 % 3])
        values = side(dim, "unbiased" if i < 36 else "percentile(0.92)", dtype, 2, per_head=i < 12)
        start = tensor(2, dtype=torch.int32) if starts else None
        counters = tensor(COUNTERS, dtype=torch.int32)
        text = f"keys {rule} values {'unbiased' if i < 36 else 'percentile'} D {dim} {way} {name_of(dtype)}"
        if way == "ahead":
            yield text, lambda a=(keys, values, counters, RECENT, start): encode_ahead_triton(*a)
        else:
            new = tensor(2, HEADS, 1, dim, dtype=dtype)
            lengths = (2000, 1680) if way == "host" else counters
            yield text, lambda a=(keys, values, new, new, lengths, RECENT, start): place_tokens_triton(*a)


def dequantize_cases():
    """Every head dim, rotated or not, some tokens or many."""
    for i, (dim, rotated, tokens) in enumerate(itertools.product(GROUPS, (False, True), (16, 1000))):
        center, dtype = CENTERS[(i + i // 4) % 3], DTYPES[i % 3]
        made = side(dim, "percentile(0.96)", dtype, center=center, symmetric=i // 4 % 2 == 0)
        text = f"D {dim} center {center} {'rotated' if rotated else ''} {tokens} tokens {name_of(dtype)}"
        yield text, lambda a=(made, 0, tokens, dtype, rotated): dequantize_rows_triton(*a)


def decode_cases():
    """Head dims, dtypes and centers, few programs and many, lengths on the host and on the device; masks and drafts apart."""
    plain = dict(heads=4 * HEADS, new=1, mask=None, softcap=None, symmetric=True, group=None)
    for dim, dtype, center, (batch, device) in itertools.product(
        (64, 128, 256), (BF16, FP16), CENTERS[:2], ((1, False), (32, True))
    ):
        yield decode_case(dim, dtype, center, batch, device, **plain)
    for i, dim in enumerate((64, 128, 256)):
        mask = tensor(4, 1, 4, CAPACITY, dtype=(torch.bool, BF16, FP32)[i])
        yield decode_case(dim, BF16, "block", 4, True, **plain | dict(mask=mask, new=4))
        yield decode_case(dim, FP32, CENTERS[i], 1, True, **plain | dict(symmetric=False, heads=HEADS, group=dim // 4))
        yield decode_case(dim, FP16, "none", 8, False, **plain | dict(softcap=50.0, heads=7 * HEADS, group=dim // 2))
    yield decode_case(128, BF16, "block", 1, False, **plain | dict(heads=8 * HEADS))
    yield decode_case(128, BF16, "block", 1, True, **plain | dict(heads=2 * HEADS))


def decode_case(dim, dtype, center, batch, on_device, heads, new, mask, softcap, symmetric, group):
    """The three launches of decode attention, with the block sizes of a GPU."""
    keys, values = (side(dim, "search", dtype, batch, where, symmetric, group) for where in (center, "none"))
    start = tensor(batch, dtype=torch.int32) if on_device else None
    lengths = [tensor(1, dtype=torch.int32)] * 2 if on_device else [SINK + 4000 + RING, 4000]
    store, query = DecodeStore(keys, values, *lengths, start), tensor(batch, heads, new, dim, dtype=dtype)
    # What `choose_tuning` asks of a query, for tensors without data are on no GPU.
    likeness = types.SimpleNamespace(shape=query.shape, device=torch.device("cuda", 0))
    problem = decode_problem(query, store)

    def launch():
        if problem:
            raise ValueError(problem)
        facts = None if mask is None else mask_facts(mask, lengths[0], new)
        chosen = tuning_module.choose_tuning(likeness, store)
        decode_attention(query, store, mask=mask, mask_facts=facts, softcap=softcap, tuning=chosen)

    text = f"D {dim} center {center} {heads // HEADS} heads batch {batch} {new} new {'device' if on_device else 'host'}"
    if mask is not None:
        text += f" mask {name_of(mask.dtype)}"
    return f"{text} {'softcap ' if softcap else ''}{name_of(dtype)}", launch


CASES = {"append": append_cases, "step": step_cases, "dequantize": dequantize_cases, "decode": decode_cases}


def name_of(dtype):
    """Name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


class Driver:
    """What Triton's compiler asks of a driver, where there is none."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)


def usage(kernel):
    """Registers, and words in local memory, of each thread of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1]) // 4


class Compiler:
    """Takes the place of `JITFunction.run`: compiles what is launched and prints a line about it."""

    def __init__(self, arch):
        self.room = SHARED[arch] * 1024
        self.case, self.seen, self.failures, self.spills = "", set(), [], 0
        self.run = JITFunction.run

    def launch(self, function, *args, grid, warmup=False, **kwargs):
        """Called as `function.run`."""
        name, begin = function.fn.__name__.strip("_"), time.perf_counter()
        try:
            kernel = self.run(function, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:
            return self.fail(name, error)
        if kernel.hash in self.seen:
            return
        self.seen.add(kernel.hash)
        seconds, (registers, spills), shared = time.perf_counter() - begin, usage(kernel), kernel.metadata.shared
        self.spills += spills > 0
        print(f"{name:18} {registers:4} {spills:6} {shared:7} {seconds:6.1f}  {self.case}", flush=True)
        if shared > self.room:
            self.fail(name, f"{shared} bytes of shared memory, and the GPU has {self.room}")

    def fail(self, name, error):
        """Note what went wrong in a launch, or before it."""
        # Errors in device functions wrap one another, the innermost last.
        while getattr(error, "__cause__", None) is not None:
            error = error.__cause__
        # Triton shows the source of the whole function down to the line in question, a caret, and what is wrong.
        text = " <- ".join(line.strip() for line in reversed(str(error).splitlines()[-3:]) if line.strip(" ^"))
        self.failures.append(f"{name}: {self.case}: {text}")
        print(f"FAILED {self.failures[-1]}", flush=True)


def main(arguments=None):
    """Compile all cases, or those whose text has all the given words; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--arch", type=int, default=90, choices=SHARED, help="compute capability without its point (90)"
    )
    parser.add_argument("words", nargs="*", help="only cases with all of these in their text, such as: append 'D 128'")
    options = parser.parse_args(arguments)
    triton.runtime.driver.set_active(Driver(options.arch))
    compiler = Compiler(options.arch)
    print(f"Triton {triton.__version__}, sm_{options.arch}")
    print(f"{'kernel':18} {'regs':>4} {'spills':>6} {'shared':>7} {'s':>6}  case")
    facts = (132 if options.arch >= 90 else 108, options.arch >= 90)
    with (
        mock.patch.object(JITFunction, "run", lambda function, *args, **kw: compiler.launch(function, *args, **kw)),
        mock.patch.object(tuning_module, "_device_facts", lambda index: facts),
        mock.patch.object(sys.modules[mask_module.__module__], "launch_problem", lambda device: ""),
    ):
        for kind, cases in CASES.items():
            for text, launch in cases():
                compiler.case = f"{kind} {text}"
                if all(word in compiler.case for word in options.words):
                    try:
                        launch()
                    except Exception as error:
                        compiler.fail("no launch", error)
    print(f"{len(compiler.seen)} kernels, {compiler.spills} with spills, {len(compiler.failures)} failures")
    return 1 if compiler.failures or not compiler.seen else 0


if __name__ == "__main__":
    sys.exit(main())
