"""What each part of the default recipe is worth: KL from the exact cache by position, all variants in one run.

    python benchmarks/quality_steps.py MODEL_FOLDER --gguf-file model.gguf --text book.txt --calibrate other.txt --json steps.json

`examples/fetch_model.py qwen2.5-coder` fetches the model of docs/quality.md. The text is read from `--offset` on. `--calibrate`
adds the recipes that are calibrated, on sequences of 2,048 and of `--tokens` tokens of another text.
"""

import argparse
import json
from pathlib import Path

from oscar_hf import Artifact, calibrate
from oscar_hf.artifact.recipes import PUBLISHED_STORAGE
from oscar_hf.calibration.evaluate import Evaluation
from oscar_hf.cli.loading import load_model

# Name, recipe, and what of its storage is different.
STEPS = [
    ("hadamard, published storage", "hadamard", PUBLISHED_STORAGE),
    ("+ centers of blocks", "hadamard", PUBLISHED_STORAGE | {"key_center": "block"}),
    ("+ symmetric", "hadamard", {"key_scale": "percentile(0.96)", "value_scale": "percentile(0.92)"}),
    ("+ the prompt's metric, search", "hadamard", {"key_scale": "weighted_search", "value_scale": "percentile(0.92)"}),
    ("+ feedback", "hadamard", {"value_scale": "percentile(0.92)"}),
    ("+ unbiased values = hadamard", "hadamard", {}),
    ("+ the prompt's whitening = default", "default", {}),
    ("default without centers", "default", {"key_center": "none"}),
    ("default, blocks of 64", "default", {"key_block": 64}),
    ("default, blocks of 256", "default", {"key_block": 256}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--gguf-file")
    parser.add_argument("--text", required=True)
    parser.add_argument(
        "--offset", type=float, default=0.3, help="where to begin, as a share of the text (default: 0.3)"
    )
    parser.add_argument("--tokens", type=int, default=32000)
    parser.add_argument("--first", type=int, default=2048, help="first position that is judged (default: 2048)")
    parser.add_argument("--calibrate", metavar="TEXT")
    parser.add_argument("--only", nargs="+", default=[""], help="variants whose names hold one of these (default: all)")
    parser.add_argument("--json")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, gguf_file=args.gguf_file)
    ids = tokenizer(Path(args.text).read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    begin = min(int(args.offset * ids.shape[1]), max(0, ids.shape[1] - args.tokens))
    evaluation = Evaluation(model, [ids[:, begin : begin + args.tokens]], args.first)
    found = {}

    def is_wanted(name):
        return any(part in name for part in args.only)

    def judge(name, artifact, side="kv", **storage):
        if not is_wanted(name):
            return
        quality = evaluation.judge(artifact, side, **storage)
        found[name] = quality.as_dict()
        places = "  ".join(f"{place.split('-')[0]}: {kl:.4f}" for place, kl in quality.kl_by_position.items())
        print(
            f"{name:36s} {quality.bits:.2f} bits  KL {quality.kl:.4f}  {places}  perplexity {quality.perplexity:.3f}",
            flush=True,
        )

    for name, recipe, storage in STEPS:
        judge(name, Artifact.data_free(recipe), **storage)
    judge("default, keys alone", Artifact.data_free(), "k")
    judge("default, values alone", Artifact.data_free(), "v")
    if args.calibrate:
        text = Path(args.calibrate).read_text(encoding="utf-8")
        for context in (2048, args.tokens):
            for recipe in ("paper", "balanced"):
                if not is_wanted(f"{recipe}, calibrated on {context}"):
                    continue
                artifact = calibrate(
                    model, tokenizer, text, recipe=recipe, context=context, progress=False, judge=False
                )
                judge(f"{recipe}, calibrated on {context}", artifact)
                if recipe == "paper" and context == 2048:
                    judge("paper, published storage", artifact, **PUBLISHED_STORAGE)
    print(f"exact: perplexity {evaluation.judge(Artifact.data_free()).reference_perplexity:.3f}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
