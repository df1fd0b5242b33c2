"""The documentation keeps its word: links and paths lead somewhere, and its code runs as printed.

A block of Python finds `model`, `tokenizer`, `inputs`, `document`, `question`, `cache` and `torch` ready, new for each
block; the blocks of a file share all other names. Of a bash block the lines that begin with `oscar-hf` run. A block is left
out if `<!-- not run: reason -->` stands on the line before it, or in the README a `<!-- ci: tag -->` that .ci/run executes.

All code runs in one process, started as `python tests/test_docs.py RESULTS`: huggingface_hub reads its endpoint when it is
imported, and here that is a server on this machine.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = (
    "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "benchmarks/RESULTS.md",
    "hub_artifacts/README.md",
)  # fmt: skip
FILES = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]
NAMES = [path.relative_to(ROOT).as_posix() for path in FILES]
# What else there is would slip past the test, as ```py or ```sh do.
LANGUAGES = {"python", "bash", "text", "json", "mermaid"}
TOP = sorted(path.name for path in ROOT.iterdir() if (path.is_dir() and path.name[0] not in "._") or path.name == ".ci")
LOCAL_FOLDERS = "work|tmp|home|root|Users|mnt|opt|var|usr|srv|private|scratch"
TIMEOUT = 300


@dataclass
class Block:
    """A fenced block: its language, the number of its first line of code, its code, and the line above the fence."""

    language: str
    line: int
    code: str
    above: str

    @property
    def left_out(self) -> bool:
        return bool(re.fullmatch(r"<!-- (not run|ci): \S.* -->", self.above))


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text."""
    found, lines, start = [], text.splitlines(), None
    for number, line in enumerate(lines):
        if not (fence := re.match(r" *```(.*)", line)):
            continue
        if start is None:
            start, language = number, fence[1].strip()
            continue
        code = textwrap.dedent("\n".join(lines[start + 1 : number]))
        found.append(Block(language, start + 2, code, lines[start - 1].strip() if start else ""))
        start = None
    assert start is None, f"the block that begins in line {start + 1} has no end"
    return found


def prose(text: str) -> list[tuple[int, str]]:
    """(number, line) of a text without its fenced blocks."""
    inside, kept = False, []
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r" *```", line)
        inside ^= bool(fence)
        if not inside and not fence:
            kept.append((number, line))
    return kept


def anchors(path: Path) -> set[str]:
    """What GitHub calls the headings of a file."""
    seen = {}
    for _, line in prose(path.read_text(encoding="utf-8")):
        if heading := re.match(r"#{1,6} +(.*?) *#*$", line):
            words = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            seen[name] = seen.get(name, -1) + 1
            if seen[name]:
                seen[f"{name}-{seen[name]}"] = 0
    return set(seen)


def repository_files() -> set[str]:
    """Paths of this checkout, from its root, without what tools leave behind."""
    kept = set()
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if name == ".ci" or (not name.startswith((".", "__")) and "egg" not in name)]
        kept.update((Path(folder) / name).relative_to(ROOT).as_posix() for name in names)
    return kept


@pytest.fixture(scope="module")
def files():
    return repository_files()


# ------------------------------------------------------------------------------------------------------ what it names
@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    path, wrong = ROOT / name, []
    lines = prose(path.read_text(encoding="utf-8"))
    defined = {found[1] for _, line in lines if (found := re.match(r"\[([^]]+)\]: ", line))}
    for number, line in lines:
        line = re.sub(r"`[^`]*`", "`code`", line)
        # [text][label], or [label] alone in a cell of a table.
        labels = re.findall(r"\]\[([^]]+)\]", line) + re.findall(r"\| \[([a-z][a-z ]+)\] \|", line)
        wrong += [f"{name}:{number}: [{label}] is not defined" for label in labels if label not in defined]
        for target in re.findall(r"\]\(<?([^)>\s]*)>?[^)]*\)|^\[[^]]+\]: *(\S+)", line):
            target = "".join(target)
            if re.match(r"(https?|mailto):", target):
                continue
            file, _, anchor = target.partition("#")
            other = (path.parent / file).resolve() if file else path
            if not target or file.startswith("/") or not other.is_relative_to(ROOT) or not other.exists():
                wrong.append(f"{name}:{number}: no file {target!r}")
            elif anchor and (other.suffix != ".md" or anchor not in anchors(other)):
                wrong.append(f"{name}:{number}: {other.name} has no heading #{anchor}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_paths_exist(name, files):
    """`oscar_hf/x/y.py` from the root; `y.py`, `x/y.py` and `notes.md` by the end of a path, or beside the file."""
    folder, wrong = Path(name).parent, []
    text = (ROOT / name).read_text(encoding="utf-8")
    quoted = [(number, span) for number, line in prose(text) for span in re.findall(r"`([^`]+)`", line)]
    commands = [(block.line, word) for block in blocks(text) if block.language == "bash" for word in block.code.split()]
    for number, span in quoted + commands:
        for word in span.split():
            word = word.strip("\"',;()").split("::")[0].split("#")[0]
            if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)*/?", word) or "..." in word:
                continue
            known = word.split("/")[0] in TOP and "/" in word
            if not known and not re.search(r"\w\.(py|md)$", word):
                continue
            near = ROOT / folder / word
            if known and not ((ROOT / word).exists() or near.exists()):
                wrong.append(f"{name}:{number}: no {word}")
            elif not known and not near.exists() and not any(f"/{path}".endswith(f"/{word}") for path in files):
                wrong.append(f"{name}:{number}: no file of the repository ends in {word}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "CHANGELOG.md"])
def test_modules_exist(name):
    """`oscar_hf.x.y` is a module, or a name in one. The changelog also names what is gone."""
    wrong = []
    for number, line in prose((ROOT / name).read_text(encoding="utf-8")):
        for dotted in re.findall(r"`oscar_hf\.([\w.]+)", line):
            parts = dotted.rstrip(".").split(".")
            for length in range(len(parts), -1, -1):
                place = ROOT.joinpath("oscar_hf", *parts[:length])
                module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
                if module.is_file():
                    break
            rest = parts[length : length + 1]
            if rest and not re.search(rf"\b{rest[0]}\b", module.read_text(encoding="utf-8")):
                wrong.append(f"{name}:{number}: no oscar_hf.{dotted}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_no_path_of_one_machine(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    pattern = re.compile(rf"(?<![\w.:/~-])/({LOCAL_FOLDERS})\b|[A-Z]:\\")
    wrong = [f"{name}:{n}: {line}" for n, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------------------ what it runs
@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_marked_in_a_way_that_is_understood(name):
    workflow, wrong = (ROOT / ".ci" / "run").read_text(encoding="utf-8"), []
    for block in blocks((ROOT / name).read_text(encoding="utf-8")):
        if block.language not in LANGUAGES:
            wrong.append(f"{name}:{block.line}: ```{block.language}: allowed are {', '.join(sorted(LANGUAGES))}")
        if block.above.startswith("<!--") and not block.left_out:
            wrong.append(f"{name}:{block.line}: {block.above} is no '<!-- not run: reason -->'")
        tag = re.fullmatch("<!-- ci: (.*) -->", block.above)
        if tag and (name != "README.md" or f"readme_command {tag[1]})" not in workflow):
            wrong.append(f"{name}:{block.line}: .ci/run does not execute {block.above}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="session")
def outcome(tmp_path_factory):
    """What came of each file's blocks, {name: [problem]}; with pytest-xdist one worker runs them for all."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "docs"
    results, deadline = folder / "results.json", time.monotonic() + TIMEOUT
    try:
        folder.mkdir()
    except FileExistsError:
        while not results.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        return json.loads(results.read_text(encoding="utf-8"))
    # No token, no cache and no offline mode of the user's; no GPU and no interpreted kernels. The C library keeps memory
    # that is freed: most of a step of a large static cache would go into getting it anew.
    dropped = ("HF_", "HUGGING", "TRITON_", "TRANSFORMERS_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    environment |= dict(
        HF_HOME=str(folder / "home"), HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_PROGRESS_BARS="1",
        HF_HUB_DISABLE_TELEMETRY="1", NO_PROXY="127.0.0.1", no_proxy="127.0.0.1", CUDA_VISIBLE_DEVICES="",
        TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), MALLOC_TOP_PAD_=str(1 << 28),
        MALLOC_MMAP_THRESHOLD_=str(1 << 32), MALLOC_TRIM_THRESHOLD_=str(1 << 32),
    )  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, __file__, str(folder / "made.json")], env=environment, cwd=folder, capture_output=True,
            text=True, timeout=TIMEOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        content = (folder / "made.json").read_text(encoding="utf-8")
    except (AssertionError, subprocess.TimeoutExpired) as error:
        content = json.dumps({name: [f"the process that runs the blocks failed: {error}"] for name in NAMES})
    # In one step: another worker may be waiting for it.
    (folder / "written.json").write_text(content, encoding="utf-8")
    os.replace(folder / "written.json", results)
    return json.loads(content)


@pytest.mark.parametrize("name", NAMES)
def test_code_runs(name, outcome):
    assert not outcome[name], "\n".join(outcome[name])


# ------------------------------------------------------------------------------------------------------ the process
def main(results: str) -> None:
    """Run all blocks of all files; write {name: [problem]} to a file."""
    from hub_server import HubServer

    results = Path(results).resolve()
    with HubServer({}) as hub:
        os.environ["HF_ENDPOINT"] = hub.url
        surroundings = Surroundings(hub, Path.cwd() / "base")
        outcome = {name: run_file(name, surroundings) for name in NAMES}
    results.write_text(json.dumps(outcome), encoding="utf-8")


class Surroundings:
    """What blocks find: a model, its tokenizer and artifact, texts; on disk, on the local Hub, and as names."""

    def __init__(self, hub, folder: Path):
        import functools
        import warnings

        import torch
        from hub_server import Repo
        from tiny_models import tiny_model

        from oscar_hf import calibrate

        # Another backend would need a C++ compiler, and most of the time. What is captured stays the same.
        torch.compile = functools.partial(torch.compile, backend="eager")
        warnings.simplefilter("ignore")
        self.folder = folder
        self.text = (ROOT / "examples" / "prompt_sense_and_sensibility.txt").read_text(encoding="utf-8")
        self.tokenizer = byte_tokenizer()
        self.model = tiny_model(
            "llama", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, vocab_size=len(self.tokenizer), max_position_embeddings=4096,
            bos_token_id=None,
        )  # fmt: skip
        # A step over a static cache of 131,072 tokens takes a CPU half a second: generate() ends early, not by a count.
        self.model.generation_config.max_time = 0.5
        artifact = calibrate(self.model, self.tokenizer, self.text, tokens=2048, progress=False)
        artifact.save(folder / "my-artifact")
        for target in (self.model, self.tokenizer):
            target.save_pretrained(folder / "Qwen" / "Qwen3-8B")
        # One sequence of the length that `oscar-hf eval` takes by default.
        (folder / "book.txt").write_text(self.text[:4200], encoding="utf-8")
        for name in ("examples", "hub_artifacts"):
            (folder / name).symlink_to(ROOT / name)
        commit, content = "1" * 40, {path.name: path.read_bytes() for path in (folder / "my-artifact").iterdir()}
        for name in ("together/oscar-qwen3-8b", "owner/artifact"):
            hub.repos[name] = Repo({commit: content}, {"main": commit})

    def names(self) -> dict:
        """New values for a block."""
        import copy

        import torch

        from oscar_hf import OscarCache

        torch.manual_seed(0)
        model, document = copy.deepcopy(self.model), self.text[:500]
        return dict(
            model=model, tokenizer=copy.deepcopy(self.tokenizer), document=document, question="\nWho is she?",
            inputs=self.tokenizer(document, return_tensors="pt"), torch=torch,
            cache=OscarCache.from_pretrained(self.folder / "my-artifact", config=model.config),
        )  # fmt: skip


def byte_tokenizer():
    """A tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({"<pad>": 0, **{letter: i for i, letter in enumerate(alphabet, 1)}}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", padding_side="left")


def run_file(name: str, surroundings: Surroundings) -> list[str]:
    """Run a file's blocks in order, in a folder of their own; what went wrong."""
    import contextlib
    import io
    import shutil
    import traceback

    place = surroundings.folder.parent / "runs" / name.replace("/", "-")
    shutil.copytree(surroundings.folder, place, symlinks=True)
    os.chdir(place)
    problems, shared = [], {"__name__": "__main__"}
    for block in blocks((ROOT / name).read_text(encoding="utf-8")):
        run = {"python": run_python, "bash": run_bash}.get(block.language)
        if run is None or block.left_out or needs_newer_transformers(block):
            continue
        shared |= surroundings.names()
        started, output = time.monotonic(), io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                run(name, block, shared)
        except (Exception, SystemExit):
            where = traceback.format_exc().partition(f'File "{name}"')
            problems.append(f"{name}:{block.line}: {''.join(where[1:]) or where[0]}{output.getvalue()[-1000:]}")
        print(f"{name}:{block.line}: {time.monotonic() - started:.2f} s", file=sys.stderr)
    return problems


def needs_newer_transformers(block: Block) -> bool:
    from transformers.generation import utils

    return "deferred_stop(" in block.code and not hasattr(utils, "DeferredStopCheck")


def run_python(name: str, block: Block, names: dict) -> None:
    # Lines are numbered as in the file.
    exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), names)


def run_bash(name: str, block: Block, names: dict) -> None:
    import shlex

    from oscar_hf.cli.main import main as command

    for line in re.sub(r"\\\n", " ", block.code).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] != ["oscar-hf"]:
            continue
        assert not {"|", ">", "&&", ";"} & set(words), f"one command a line: {line}"
        try:
            code = command(words[1:])
        except SystemExit as end:
            code = end.code
        assert not code, f"exit code {code} of {line}"


if __name__ == "__main__":
    main(sys.argv[1])
