"""`oscar-hf eval --tasks retrieval`: the arguments, and the tables of scores. Imports torch only once it runs."""

import argparse
import sys

from ..calibration.retrieval_tasks import TASKS
from ..checks import at_least

# Names that stand for all tasks.
ALL = ("retrieval", "ruler")
LENGTHS = (4096, 8192, 16384, 32768)
SAMPLES, QUESTIONS = 50, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `oscar-hf eval` that only retrieval has."""
    group = parser.add_argument_group(
        "retrieval",
        "Needles, chains of variables and common words in long prompts, as in RULER (arXiv 2404.06654) but with texts of this "
        "package's own; greedy answers, with the exact cache and with the packed one.",
    )
    group.add_argument(
        "--tasks",
        nargs="+",
        type=_names,
        metavar="T",
        help=f"retrieval (or ruler) for all, or some of {', '.join(TASKS)}",
    )
    group.add_argument(
        "--lengths", nargs="+", type=_lengths, metavar="N",
        help=f"tokens of a prompt with its answer (default: those of {', '.join(map(str, LENGTHS))} that the model takes)",
    )  # fmt: skip
    group.add_argument(
        "--samples", type=at_least(1), default=SAMPLES, metavar="N",
        help="questions of each task and length (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--questions", type=at_least(1), default=QUESTIONS, metavar="N",
        help="questions about one context, which is read once for all; each brings its own needles, 1 is as in RULER "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--batch", type=at_least(1), default=1, metavar="N",
        help="contexts read at a time; recipes that learn from the prompt learn from these together (default: %(default)s)",
    )  # fmt: skip


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in (*TASKS, *ALL):
            raise argparse.ArgumentTypeError(f"unknown task {name!r}: there are {', '.join([*ALL, *TASKS])}")
    return names


def _lengths(text: str) -> list[int]:
    return [at_least(1)(number) for number in text.split(",") if number]


def run(args, artifacts: dict, load) -> dict:
    """Answer, print the tables, and return what goes into the JSON. load: gives the model and its tokenizer."""
    from tqdm.auto import tqdm

    from ..calibration import retrieval
    from ..calibration.retrieval_prompts import Prompts
    from ..calibration.text import read_texts
    from ..transformers_compat.model_config import longest_context

    named = [name for names in args.tasks for name in names]
    tasks = list(TASKS) if set(named) & set(ALL) else list(dict.fromkeys(named))
    text, source = read_texts(args.text) if args.text else retrieval.default_haystack()
    model, tokenizer = load(args)
    if args.lengths:
        lengths = sorted({length for lengths in args.lengths for length in lengths})
    else:
        most = longest_context(model.config, LENGTHS[-1])
        lengths = [length for length in LENGTHS if length <= most] or [most]
    retrieval.check_lengths(model, lengths)
    held = Prompts(tokenizer, text).tokens_of_text(lengths[-1])
    contexts = retrieval.contexts_of(args.samples, args.questions)
    with tqdm(total=contexts * len(tasks) * len(lengths), desc="answering", unit="context") as bar:
        samples = retrieval.retrieve(
            model, tokenizer, artifacts, text, tasks, lengths, samples=args.samples, questions=args.questions,
            batch=args.batch, seed=args.seed, progress=lambda done: _tell(bar, done, retrieval.mean_score),
        )  # fmt: skip
    rows, depths = retrieval.scores(samples), retrieval.by_depth(samples)
    _print(rows, depths, list(artifacts), str(model.dtype).removeprefix("torch."))
    repeats = f", which has {held} tokens: longer prompts repeat it" if held < lengths[-1] else ""
    print(
        f"\nPercent of the expected strings found, greedy; {args.questions} questions about each context, seed {args.seed}. "
        f"Hidden in {source}{repeats}.\nDifference: packed less exact, paired, with its 95% interval (Agresti and Min; where "
        "contexts differ more than their questions tell, by contexts)."
    )
    return {
        "scores": [row.as_dict() for row in rows],
        "by_depth": depths,
        "samples": [vars(sample) for sample in samples],
        "text": source,
        "dtype": str(model.dtype),
        **{name: getattr(args, name) for name in ("model", "questions", "batch", "seed")},
    }


def _tell(bar, done: list, mean_score) -> None:
    """A line for a batch, so that a run that is cut short has shown something."""
    found = ", ".join(f"{name} {mean_score(done, name):.1f}" for name in done[0].answers)
    contexts = len({sample.context for sample in done})
    bar.write(f"{done[0].task}, {done[0].length} tokens, {contexts} contexts: {found}", file=sys.stderr)
    bar.update(contexts)


def _print(rows: list, depths: list[dict], caches: list[str], exact: str) -> None:
    from ..bench.report import table

    columns = [
        ("task", "task", "s"), ("tokens", "length", "d"), ("cache", "cache", "s"), ("contexts", "contexts", "d"),
        ("samples", "samples", "d"), (exact, "exact", ".1f"), ("packed", "packed", ".1f"),
        ("difference", "difference", "+.1f"), ("95% interval", "interval", "s"),
    ]  # fmt: skip
    print(table([row.as_dict() | {"interval": f"{row.low:+.1f} .. {row.high:+.1f}"} for row in rows], columns))
    if depths:
        columns = [("needles at depth", "depth", "s"), ("tokens", "length", "d"), ("needles", "needles", "d")]
        print("\n" + table(depths, [*columns, (exact, "exact", ".1f"), *((name, name, ".1f") for name in caches)]))
