"""Quality of other quantized caches beside ours: KL from the exact cache by position, all in one run.

    python benchmarks/rivals.py MODEL_FOLDER --gguf-file model.gguf --text book.txt --json rivals.json

Each rival's quantizer stands between update and attention, as in `oscar_hf.evaluate`. A query sees the last `recent` tokens exact,
which is the most that a rival keeps: KIVI and transformers' QuantizedCache keep 0 to 127 of them. What QuantizedCache quantizes
once more every 128 tokens is quantized once here. Both favor the rivals. hqq is used if it is installed.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oscar_hf import Artifact
from oscar_hf.artifact.recipes import PUBLISHED_STORAGE
from oscar_hf.calibration import evaluate as evaluation_module
from oscar_hf.calibration.evaluate import Evaluation, StreamingLayer
from oscar_hf.cli.loading import load_model


def affine(groups: Tensor, levels: int) -> Tensor:
    """Asymmetric rounding of each row to 0..levels between its minimum and its maximum; both stored in its dtype."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / levels).clamp(min=1e-8)
    return ((groups - low) / scale).round().clamp(0, levels) * scale + low


def per_token(x: Tensor, bits: int, group: int) -> Tensor:
    """Groups of neighboring channels of a token: what quanto does along axis 0 of [B, H, T, D]."""
    group = min(group, x.shape[-1])
    return affine(x.unflatten(-1, (-1, group)), 2**bits - 1).flatten(-2)


def per_channel(x: Tensor, bits: int, group: int) -> Tensor:
    """Groups of neighboring tokens of a channel; what does not fill a group stays exact, as in KIVI."""
    whole = x.shape[2] // group * group
    packed = affine(x[:, :, :whole].mT.unflatten(-1, (-1, group)), 2**bits - 1).flatten(-2).mT
    return torch.cat([packed, x[:, :, whole:]], 2)


def hqq(x: Tensor, bits: int, group: int) -> Tensor:
    """hqq along axis 1, which is along channels, with its own search of the zero point."""
    from hqq.core.quantize import Quantizer

    packed, meta = Quantizer.quantize(
        x.contiguous(), axis=1, device=x.device, compute_dtype=x.dtype, nbits=bits, group_size=group
    )
    meta["compute_dtype"] = x.dtype
    return Quantizer.dequantize(packed, meta).reshape(x.shape).to(x.dtype)


def fp8(x: Tensor) -> Tensor:
    """e4m3 with one scale for the tensor, as transformers' fp8 cache."""
    scale = (x.abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-30)
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


@dataclass(frozen=True)
class Rival:
    """A quantizer of keys and values, the bits of an element with its share of scales, and how many last tokens stay exact."""

    keys: object
    values: object
    bits: float
    recent: int


def rivals() -> dict[str, Rival]:
    """Name and what it does."""
    found = {}
    for group in (32, 128):
        found[f"KIVI, 2 bits, groups of {group}"] = Rival(
            lambda x, g=group: per_channel(x, 2, g), lambda x, g=group: per_token(x, 2, g), 2 + 32 / group, 128
        )
    for bits in (2, 4):

        def quanto(x, bits=bits):
            return per_token(x, bits, 64)

        def search(x, bits=bits):
            return hqq(x, bits, 64)

        found[f"QuantizedCache, quanto, {bits} bits"] = Rival(quanto, quanto, bits + 0.5, 128)
        found[f"QuantizedCache, hqq, {bits} bits"] = Rival(search, search, bits + 0.5, 128)
    found["fp8 e4m3"] = Rival(fp8, fp8, 8, 1)
    return found


def judge(evaluation: Evaluation, rival: Rival):
    """Quality of a rival."""

    class Layer(StreamingLayer):
        bits = rival.bits

        def round_trip(self, x, kind):
            return rival.keys(x) if kind == "k" else rival.values(x)

    evaluation_module.StreamingLayer = Layer
    try:
        return evaluation.judge(
            Artifact.data_free("hadamard"), sink_tokens=0, recent_tokens=rival.recent, key_block=None
        )
    finally:
        evaluation_module.StreamingLayer = StreamingLayer


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
    parser.add_argument("--json")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, gguf_file=args.gguf_file)
    ids = tokenizer(Path(args.text).read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    begin = min(int(args.offset * ids.shape[1]), max(0, ids.shape[1] - args.tokens))
    evaluation = Evaluation(model, [ids[:, begin : begin + args.tokens]], args.first)
    ours = {
        "default": lambda: evaluation.judge(Artifact.data_free()),
        "hadamard": lambda: evaluation.judge(Artifact.data_free("hadamard")),
        "default, groups of 64": lambda: evaluation.judge(Artifact.data_free(), group_size=64),
        "Hadamard, published storage": lambda: evaluation.judge(Artifact.data_free("hadamard"), **PUBLISHED_STORAGE),
    }
    theirs = {name: lambda rival=rival: judge(evaluation, rival) for name, rival in rivals().items()}
    found = {}
    for name, run in {**ours, **theirs}.items():
        try:
            quality = run()
        except ImportError as error:
            print(f"{name:34s} left out: {error}")
            continue
        found[name] = quality.as_dict()
        places = "  ".join(f"{place.split('-')[0]}: {kl:.4f}" for place, kl in quality.kl_by_position.items())
        print(
            f"{name:34s} {quality.bits:.2f} bits  KL {quality.kl:.4f}  {places}  perplexity {quality.perplexity:.3f}",
            flush=True,
        )
    print(f"exact: perplexity {quality.reference_perplexity:.3f}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
