"""What the commands and the examples share: models by name, and files that can be written. Imports torch only to load."""

import os
from pathlib import Path

from ..errors import OscarError, first_line

DTYPES = ("auto", "bfloat16", "float16", "float32")


def load_model(
    name: str,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    device: str | None = None,
    dtype: str = "auto",
):
    """Model (eval mode) and tokenizer by name; failures to load become an OscarError with the reason.

    Args:
        name (`str`): Folder or Hub repository id of a causal language model.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        gguf_file (`str`, *optional*): GGUF file of the folder or repository to load from.
        device (`str`, *optional*): Defaults to `"cuda"` if there is one, else `"cpu"`.
        dtype (`str`, defaults to `"auto"`): One of `DTYPES`; auto is float32 on a CPU, most of which emulate bfloat16
            slowly, else bfloat16.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: The model on its device, and its tokenizer.

    Raises:
        `OscarError`: If transformers cannot load it, with its reason.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    options = {"revision": revision} | ({"gguf_file": gguf_file} if gguf_file else {})
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        # No attention is asked for: transformers takes sdpa, or eager for the families that have no other (GPT-OSS).
        model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype), **options)
        return model.to(device).eval(), tokenizer
    except (OSError, ValueError, RuntimeError, ImportError, AssertionError) as error:
        reason = first_line(error) + gguf_hint(name, gguf_file)
        raise OscarError(f"cannot load the model {name!r} on {device}: {reason}") from error


def gguf_hint(name: str | os.PathLike, gguf_file: str | None) -> str:
    """What to add to an error about a folder that holds GGUF files of which none was named; else nothing."""
    if gguf_file or not any(Path(name).glob("*.gguf")):
        return ""
    return "; name its GGUF file with --gguf-file"


def writable_file(path: str) -> None:
    """Raise OscarError unless a file can be written at a path, before hours are spent on what goes into it."""
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise OscarError(
            f"cannot write the file {path!r}: give a file name in a folder that exists and can be written to"
        )


def writable_folder(path: str) -> None:
    """The same for a folder that is to be made."""
    target = Path(path)
    existing = next(p for p in (target, *target.absolute().parents) if p.exists())
    if not path.strip() or not existing.is_dir() or not os.access(existing, os.W_OK):
        raise OscarError(f"cannot write the folder {path!r}: give a folder that exists or can be made")
