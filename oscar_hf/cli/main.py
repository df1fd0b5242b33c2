"""The `oscar-hf` command: calibrate, inspect, plan, eval, bench. Errors of the package end with one line and exit code 2.

Nothing here imports torch before a command runs: help and wrong arguments are answered at once.
"""

import argparse
import sys

from .. import __version__, defaults
from ..artifact.recipes import DATA_FREE_TRANSFORMS, RECIPES, VALUE_TARGETS
from ..bench.command import add_commands
from ..bench.report import write_json
from ..checks import at_least
from ..errors import OscarError
from . import retrieval
from .loading import DTYPES, load_model, writable_file, writable_folder

DATA_FREE_RECIPES = [
    name
    for name, parts in RECIPES.items()
    if {parts["key_transform"], parts["value_transform"]} <= set(DATA_FREE_TRANSFORMS)
]


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        for path in (getattr(args, "json", None), getattr(args, "plot", None)):
            if path:
                writable_file(path)
        return args.run(args)
    except (OscarError, OSError, ImportError) as error:
        print(f"oscar-hf: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("oscar-hf: interrupted, nothing was written", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="oscar-hf", description="2-bit KV cache for Hugging Face transformers")
    parser.add_argument("--version", action="version", version=f"oscar-hf {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    calibrate = commands.add_parser("calibrate", help="make an artifact for a model from its attention statistics")
    _model_arguments(calibrate)
    calibrate.add_argument("-o", "--output", required=True, metavar="DIR", help="folder to write the artifact to")
    calibrate.add_argument(
        "--recipe",
        default="balanced",
        choices=[name for name in RECIPES if name not in DATA_FREE_RECIPES],
        help="parts of the method (default: balanced); the others need no artifact",
    )
    calibrate.add_argument(
        "--base-model", metavar="NAME", help="name to record (default: the model's Hub id or folder name)"
    )
    calibrate.add_argument("--value-target", choices=VALUE_TARGETS, help="what the value covariance is weighted by")
    calibrate.add_argument(
        "--text", nargs="+", metavar="FILE", help="UTF-8 text (default: the text inside the package)"
    )
    calibrate.add_argument(
        "--tokens", type=at_least(1), default=defaults.CALIBRATION_TOKENS,
        help="tokens to calibrate on (default: %(default)s)",
    )  # fmt: skip
    calibrate.add_argument(
        "--context",
        type=at_least(1),
        help="tokens per sequence (default: as many as the model, the text and the memory allow, at most "
        f"{defaults.LONGEST_CONTEXT})",
    )
    calibrate.add_argument(
        "--seed", type=at_least(0), default=0, help="shifts the sequences within the text (default: 0)"
    )
    calibrate.add_argument(
        "--no-judge", action="store_true", help="do not compare the artifact with recipes that need none at the end"
    )
    calibrate.set_defaults(run=_calibrate)

    inspect = commands.add_parser("inspect", help="print what an artifact holds and whether it is sound")
    inspect.add_argument("artifact", help="folder, or Hub repository id")
    inspect.add_argument("--revision", help="branch, tag or commit on the Hub")
    inspect.add_argument("--subfolder", help="folder inside the repository")
    inspect.set_defaults(run=_inspect)

    plan = commands.add_parser(
        "plan", help="what the cache would do with each layer, and its bytes, from the config alone"
    )
    plan.add_argument("model", help="folder or Hub repository id; only its config is read")
    plan.add_argument("--revision", help="branch, tag or commit of the model on the Hub")
    plan.add_argument(
        "--gguf-file", metavar="F", help="read the config from this GGUF file of the folder or repository"
    )
    plan.add_argument(
        "--artifact", metavar="A", help="folder or Hub repository id (default: the recipe default, which needs none)"
    )
    plan.add_argument("--subfolder", help="folder of the artifact inside its repository")
    length = plan.add_mutually_exclusive_group()
    length.add_argument(
        "--context", type=at_least(1), metavar="N",
        help=f"tokens to count for (default: what the model takes, at most {defaults.PLAN_CONTEXT})",
    )  # fmt: skip
    length.add_argument(
        "--max-cache-len", type=at_least(1), metavar="N", help="plan a static cache of that many tokens"
    )
    plan.add_argument("--json", metavar="FILE", help="write the plan as JSON, too")
    plan.set_defaults(run=_plan)

    evaluate = commands.add_parser(
        "eval", help="compare artifacts on a model: KL divergence from the exact cache, or retrieval in long prompts"
    )
    _model_arguments(evaluate)
    evaluate.add_argument("--artifact", nargs="+", default=[], metavar="A", help="folders or Hub repository ids")
    evaluate.add_argument("--subfolder", help="folder inside the repository of each artifact")
    evaluate.add_argument(
        "--recipe", nargs="+", default=[], choices=DATA_FREE_RECIPES, metavar="R",
        help=f"recipes that need no artifact: {', '.join(DATA_FREE_RECIPES)} (default where no artifact is given: default)",
    )  # fmt: skip
    evaluate.add_argument(
        "--text", nargs="+", metavar="FILE", help="UTF-8 text not used to calibrate; only --tasks can do without"
    )
    evaluate.add_argument(
        "--context", type=at_least(4), default=defaults.EVALUATION_CONTEXT,
        help="tokens per sequence (default: %(default)s)",
    )  # fmt: skip
    evaluate.add_argument(
        "--sequences", type=at_least(1), default=defaults.EVALUATION_SEQUENCES,
        help="sequences from the text (default: %(default)s)",
    )  # fmt: skip
    evaluate.add_argument("--side", default="kv", choices=("kv", "k", "v"), help="quantize keys, values or both")
    evaluate.add_argument(
        "--seed", type=at_least(0), default=0, help="shifts the sequences within the text (default: 0)"
    )
    evaluate.add_argument("--json", metavar="FILE", help="write the results as JSON, too")
    retrieval.add_arguments(evaluate)
    evaluate.set_defaults(run=_evaluate)

    add_commands(commands.add_parser("bench", help="speed and memory on a CUDA GPU"), run=_bench)
    return parser


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or Hub repository id of a causal language model")
    parser.add_argument("--revision", help="branch, tag or commit of the model on the Hub")
    parser.add_argument(
        "--gguf-file", metavar="F", help="load the model from this GGUF file of the folder or repository"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    parser.add_argument(
        "--dtype", default="auto", choices=DTYPES, help="model dtype (default auto: float32 on a CPU, else bfloat16)"
    )


def _load(args):
    return load_model(
        args.model, revision=args.revision, gguf_file=args.gguf_file, device=args.device, dtype=args.dtype
    )


def _calibrate(args) -> int:
    from .. import Artifact, calibrate
    from ..calibration.text import read_texts

    writable_folder(args.output)
    text, source = read_texts(args.text) if args.text else (None, None)
    model, tokenizer = _load(args)
    artifact = calibrate(
        model,
        tokenizer,
        text,
        recipe=args.recipe,
        tokens=args.tokens,
        context=args.context,
        seed=args.seed,
        text_source=source,
        value_target=args.value_target,
        base_model=args.base_model or None,
        judge=not args.no_judge,
    )
    if args.gguf_file:
        artifact = artifact.with_provenance({"model_file": args.gguf_file})
    folder = artifact.save(args.output)
    print(Artifact.load(folder).describe())
    return 0


def _inspect(args) -> int:
    from .. import Artifact

    print(Artifact.load(args.artifact, revision=args.revision, subfolder=args.subfolder).describe())
    return 0


def _plan(args) -> int:
    from .. import plan

    result = plan(
        args.model,
        artifact=args.artifact,
        context=args.context,
        max_cache_len=args.max_cache_len,
        revision=args.revision,
        gguf_file=args.gguf_file,
        subfolder=args.subfolder,
    )
    print(result)
    return _finish(result.as_dict(), args.json)


def _evaluate(args) -> int:
    from tqdm.auto import tqdm

    from .. import Artifact, evaluate
    from ..calibration.text import read_texts, token_sequences

    if not args.tasks and not args.text:
        raise OscarError(
            "eval needs --text FILE, text that was not used to calibrate, or --tasks retrieval, which needs none"
        )
    artifacts = {name: Artifact.load(name, subfolder=args.subfolder) for name in args.artifact}
    recipes = args.recipe if artifacts else args.recipe or ["default"]
    artifacts |= {f"recipe {name}": Artifact.data_free(name) for name in recipes}
    if args.tasks:
        return _finish(retrieval.run(args, artifacts, _load), args.json)
    text, source = read_texts(args.text)
    model, tokenizer = _load(args)
    sequences = token_sequences(
        tokenizer, text, args.sequences * args.context, args.context, args.seed, minimum=args.context
    )
    results = {}
    with tqdm(total=len(sequences) * len(artifacts), desc="evaluating", unit="seq") as bar:
        for name, artifact in artifacts.items():
            results[name] = evaluate(model, artifact, sequences, side=args.side, progress=lambda: bar.update(1))
    print(f"{len(sequences)} x {sequences[0].shape[1]} tokens of {source}, judged on the second half")
    # Beside the perplexity with packed keys and values that of the model as it is, under the name of its dtype.
    exact = str(model.dtype).removeprefix("torch.")
    print(f"{'artifact':<44}{'recipe':<10}{'bits':>6}{'mean KL':>10}{'agreement':>11}{'perplexity':>12}{exact:>10}")
    for name, q in results.items():
        recipe = artifacts[name].config.recipe
        print(
            f"{name:<44}{recipe:<10}{q.bits:>6.2f}{q.kl:>10.4f}{q.agreement:>11.4f}{q.perplexity:>12.3f}"
            f"{q.reference_perplexity:>10.3f}"
        )
    return _finish({name: q.as_dict() for name, q in results.items()}, args.json)


def _bench(args) -> int:
    from ..bench.device import failed

    result = args.bench(args, load_model)
    print(result["machine"])
    _finish(result, args.json)
    if args.plot:
        args.draw(result, args.plot)
    return int(any(failed(row) for row in result["rows"]))


def _finish(result: dict, path: str | None) -> int:
    """Write a result where --json asked for it; the exit code."""
    if path:
        write_json(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
