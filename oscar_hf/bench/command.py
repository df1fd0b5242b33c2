"""The `oscar-hf bench` commands: their arguments, and what each runs. torch is imported only once a command runs."""

import argparse
from collections.abc import Callable

from ..checks import at_least
from ..errors import OscarError
from . import plot
from .shapes import SHAPES, check_shape

DEFAULT_CACHES = ("dynamic", "static", "quantized", "oscar")
DEFAULT_COMPILED = ("dynamic", "static", "oscar", "oscar-static")
DEFAULT_TURNS = [2048, 8192]


def add_commands(parser: argparse.ArgumentParser, run: Callable) -> None:
    """Add kernel, decode and prefill below `oscar-hf bench`. run: what the command line calls; it finds what to do in
    `args.bench`, which returns the result, and `args.draw`, which plots it to a file."""
    commands = parser.add_subparsers(required=True, metavar="WHAT")

    kernel = commands.add_parser("kernel", help="decode attention against dequantize + SDPA and BF16 SDPA")
    kernel.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        help="shapes of the table: numbers (3), ranges (1-4), parts of names (default: all)",
    )
    kernel.set_defaults(bench=bench_kernel, draw=plot.plot_kernel)

    decode = commands.add_parser("decode", help="time per token of generate(), prefill, memory and launches, per cache")
    _model_arguments(decode)
    decode.add_argument(
        "--caches", nargs="+", metavar="CACHE",
        help="dynamic, static, quantized (every backend installed), quantized-quanto, quantized-hqq, oscar, oscar-static "
        f"(default: {' '.join(DEFAULT_CACHES)}; with --compile: {' '.join(DEFAULT_COMPILED)})",
    )  # fmt: skip
    decode.add_argument(
        "--compile", action="store_true", help="let generate() compile static caches (without: no cache is compiled)"
    )
    decode.add_argument(
        "--batch", type=_batch, default=1, metavar="N|max", help="rows, or the largest number that fits"
    )
    decode.add_argument("--new-tokens", type=at_least(3), default=32, metavar="N", help="timed tokens (default: 32)")
    decode.set_defaults(bench=bench_decode, draw=plot.plot_decode)

    prefill = commands.add_parser("prefill", help="time and peak memory of prompts and of further turns, per cache")
    _model_arguments(prefill)
    prefill.add_argument("--caches", nargs="+", metavar="CACHE", help="as for decode (default: dynamic oscar)")
    prefill.add_argument("--batch", type=at_least(1), default=1, metavar="N", help="rows (default: 1)")
    prefill.add_argument(
        "--turns", type=at_least(1), nargs="*", metavar="N",
        help="also measure N new tokens on top of a history of each context (without a number: 2048 8192)",
    )  # fmt: skip
    prefill.add_argument(
        "--repeats", type=at_least(1), default=3, metavar="N", help="runs, whose median is reported (default: 3)"
    )
    prefill.set_defaults(bench=bench_prefill, draw=plot.plot_prefill)

    for command in (kernel, decode, prefill):
        command.add_argument("--device", help="cuda, cuda:1, ...")
        command.add_argument("--json", metavar="FILE", help="write the results as JSON, too")
        command.add_argument("--plot", metavar="FILE.png", help="draw the results, too (needs matplotlib)")
        command.set_defaults(run=run)


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--shape", default="qwen3-8b", help=f"shape with random weights: {', '.join(SHAPES)} (default: qwen3-8b)"
    )
    which.add_argument("--model", metavar="NAME", help="folder or Hub repository id of a causal language model instead")
    parser.add_argument("--gguf-file", metavar="F", help="load --model from this GGUF file")
    parser.add_argument(
        "--artifact", metavar="A", help="folder or Hub id (default: constants without statistics, of the same cost)"
    )
    parser.add_argument(
        "--context",
        type=at_least(2),
        nargs="+",
        default=[32768, 102400],
        metavar="N",
        help="prompt tokens (default: 32768 102400)",
    )
    parser.add_argument(
        "--synthetic-prefill", action="store_true",
        help="fill the cache (of prefill: the history) with random keys and values in place of running the model: speed "
        "does not depend on them, and long contexts and large batches take seconds",
    )  # fmt: skip
    parser.add_argument(
        "--prefill-chunk", type=at_least(1), metavar="N", help="run prompts N tokens at a time (default: all at once)"
    )


def _batch(text: str) -> int | None:
    """None for `max`."""
    try:
        return None if text == "max" else at_least(1)(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor max") from None


def bench_kernel(args, load_model: Callable) -> dict:
    """Run `oscar-hf bench kernel`."""
    from . import decode_kernel
    from .timing import require_cuda

    rows = decode_kernel.choose_rows(args.rows) if args.rows else decode_kernel.ROWS
    _check_plot(args)
    require_cuda(args.device)
    return decode_kernel.bench_kernel(rows)


def bench_decode(args, load_model: Callable) -> dict:
    """Run `oscar-hf bench decode`."""
    from . import decode

    job, kinds = _prepare(args, load_model, DEFAULT_COMPILED if args.compile else DEFAULT_CACHES)
    return decode.bench_decode(job, kinds, args.context, find_batch=args.batch is None)


def bench_prefill(args, load_model: Callable) -> dict:
    """Run `oscar-hf bench prefill`."""
    from . import prefill

    job, kinds = _prepare(args, load_model, ("dynamic", "oscar"))
    turns = DEFAULT_TURNS if args.turns == [] else args.turns or []
    return prefill.bench_prefill(job, kinds, args.context, turns, args.repeats)


def _check_plot(args) -> None:
    if args.plot:
        plot.require_plot(args.plot)


def _prepare(args, load_model: Callable, default_caches) -> tuple:
    """(job, kinds of caches); everything that can be refused is refused before a model is built."""
    from .. import Artifact
    from . import models
    from .caches import CHOICES, choose
    from .decode import Job
    from .timing import require_cuda

    names = args.caches or default_caches
    if unknown := [name for name in names if name not in CHOICES]:
        raise OscarError(f"unknown caches {', '.join(unknown)}: use {', '.join(CHOICES)}")
    _check_plot(args)
    if args.gguf_file and not args.model:
        raise OscarError("--gguf-file says which file of a model to load: give --model, too")
    if not args.model:
        check_shape(args.shape)
    device = require_cuda(args.device)
    kinds, note = choose(names)
    if note:
        print(note)
    artifact = Artifact.load(args.artifact) if args.artifact else None
    if args.model:
        model, tokenizer = load_model(args.model, gguf_file=args.gguf_file, device=str(device))
        models.plain_generation(model)
    else:
        model, tokenizer = models.shaped_model(args.shape, device), None
    job = Job(
        model,
        artifact or models.synthetic_artifact(model.config),
        tokenizer,
        batch=args.batch or 1,
        compile=getattr(args, "compile", False),
        new_tokens=getattr(args, "new_tokens", 1),
        synthetic=args.synthetic_prefill,
        prefill_chunk=args.prefill_chunk,
    )
    return job, kinds
