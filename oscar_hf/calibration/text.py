"""Text for calibration and evaluation: the package's own, files, and sequences of tokens from either."""

from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from ..artifact.config import MIN_CALIBRATION_TOKENS
from ..errors import ArtifactError

DEFAULT_TEXTS = ("calibration_prose.txt", "calibration_code.txt")


def default_text() -> tuple[str, str]:
    """The calibration text inside the package and its description; see oscar_hf/data/README.md for where it is from."""
    folder = resources.files("oscar_hf") / "data"
    parts = [(folder / name).read_text(encoding="utf-8") for name in DEFAULT_TEXTS if (folder / name).is_file()]
    return "\n\n".join(parts), "default text of oscar_hf (Austen, Emma, opening; Python source)"


def read_texts(files: list[str]) -> tuple[str, str]:
    """Text of several UTF-8 files, and their names as a description."""
    parts = []
    for name in files:
        try:
            parts.append(Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"cannot read the text file {name!r} ({error}): give UTF-8 text files") from None
    return "\n\n".join(parts), ", ".join(Path(name).name for name in files)


def token_sequences(
    tokenizer, text: str, tokens: int, context: int, seed: int, minimum: int = MIN_CALIBRATION_TOKENS
) -> list[Tensor]:
    """About `tokens` tokens of a text as sequences [1, context], spread over it and shifted by the seed.

    What is left of `tokens` is a shorter sequence at the end, if it is at least an eighth of `context`. Each begins with the
    tokenizer's BOS token if it uses one. Raises ArtifactError if they are fewer than `minimum`.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer("a")["input_ids"][:1] != [bos]:
        bos = None
    if not context >= 1:
        raise ArtifactError(f"context: got {context}, allowed is at least 1 token")
    if min(tokens, len(ids)) < minimum:
        raise ArtifactError(
            f"at least {minimum} tokens are needed: asked for {tokens}, the text has {len(ids)}; "
            "give more text (--text) or more --tokens"
        )
    tokens = min(tokens, len(ids))
    context = min(context, tokens)
    lengths = [context] * (tokens // context)
    if tokens % context >= context / 8:
        lengths.append(tokens % context)
    # What the text has more than is asked for lies between the sequences.
    gap = (len(ids) - sum(lengths)) // len(lengths)
    begin = int(torch.randint(0, gap + 1, (1,), generator=torch.Generator().manual_seed(seed)))
    sequences = []
    for length in lengths:
        piece = ids[begin : begin + length]
        sequences.append(torch.tensor([[bos] + piece[:-1] if bos is not None else piece]))
        begin += length + gap
    return sequences
