"""Worked reasoning whose answers a program checks: GSM8K with the exact cache and with OscarCache, the same problems in one run.

    python benchmarks/gsm8k.py MODEL_FOLDER --gguf-file model.gguf --problems test.jsonl --examples train.jsonl --json gsm8k.json

The files are those of github.com/openai/grade-school-math (grade_school_math/data). Worked examples before each problem make its
prompt long enough to be packed. Greedy; an answer ends where the model begins a next question.
"""

import argparse
import json
import re
import time
from pathlib import Path

import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from oscar_hf import OscarCache
from oscar_hf.calibration.retrieval import paired_interval
from oscar_hf.cli.loading import load_model
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CALCULATOR = re.compile(r"<<[^>]*>>")


def read(path: str, count: int) -> list[dict]:
    """The first problems of a file."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line) for line in lines]


def worked(problem: dict) -> str:
    """A problem and its solution, as the prompt shows it."""
    return f"Question: {problem['question']}\nAnswer: {_CALCULATOR.sub('', problem['answer'])}\n\n"


def number(text: str) -> float | None:
    """The number after ####, or else the last one."""
    end = text.split("####")[-1] if "####" in text else text
    found = _NUMBER.findall(end)
    if not found:
        return None
    return float((found[0] if "####" in text else found[-1]).replace(",", ""))


class NextQuestion(StoppingCriteria):
    """Rows end where a next question begins."""

    def __init__(self, tokenizer, prompt: int):
        self.tokenizer, self.prompt = tokenizer, prompt

    def __call__(self, input_ids, scores, **kwargs):
        ends = self.tokenizer.batch_decode(input_ids[:, max(self.prompt, input_ids.shape[1] - 12) :])
        return torch.tensor(["Question:" in end for end in ends], device=input_ids.device)


@torch.no_grad()
def answers(model, tokenizer, prompts: list[str], make_cache, new_tokens: int) -> list[str]:
    """What a model writes after each prompt."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    prompt = inputs["input_ids"].shape[1]
    made = model.generate(
        **inputs, **{CACHE_ARGUMENT: make_cache()}, max_new_tokens=new_tokens, do_sample=False, repetition_penalty=1.0,
        stopping_criteria=StoppingCriteriaList([NextQuestion(tokenizer, prompt)]), pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    texts = tokenizer.batch_decode(made[:, prompt:], skip_special_tokens=True)
    return [text.split("Question:")[0] for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--gguf-file")
    parser.add_argument("--problems", required=True)
    parser.add_argument("--examples", required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--shots", type=int, default=16, help="worked examples before each problem (default: 16)")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--recipe", nargs="+", default=["default"])
    parser.add_argument("--json")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, gguf_file=args.gguf_file)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    problems = read(args.problems, args.count)
    prefix = "".join(worked(one) for one in read(args.examples, args.shots))
    prompts = [f"{prefix}Question: {one['question']}\nAnswer:" for one in problems]
    expected = [number(one["answer"]) for one in problems]
    caches = {"exact": lambda: DynamicCache(config=model.config)}
    caches |= {recipe: lambda recipe=recipe: OscarCache(model.config, recipe=recipe) for recipe in args.recipe}
    length, right, texts = len(tokenizer(prompts[0])["input_ids"]), {}, {}
    for name, make in caches.items():
        begin, texts[name] = time.time(), []
        for first in range(0, len(prompts), args.batch):
            texts[name] += answers(model, tokenizer, prompts[first : first + args.batch], make, args.new_tokens)
        right[name] = [number(text) == want for text, want in zip(texts[name], expected)]
        share = 100 * sum(right[name]) / len(prompts)
        line = f"{name:12s} {share:5.1f}% of {len(prompts)} problems, prompts of about {length} tokens"
        if name != "exact":
            differences = [float(a) - float(b) for a, b in zip(right[name], right["exact"])]
            center, spread = paired_interval(differences, list(range(len(differences))))
            line += f", difference {100 * sum(differences) / len(differences):+.1f} points"
            line += f" ({100 * (center - spread):+.1f} .. {100 * (center + spread):+.1f})"
        print(f"{line}, {time.time() - begin:.0f} s", flush=True)
    if args.json:
        content = {name: dict(right=right[name], answers=texts[name]) for name in caches}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
