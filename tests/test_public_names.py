"""What `import oscar_hf` gives: every public name, none of them shadowed, and nothing heavy before it is used."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import oscar_hf
from oscar_hf import requirements
from oscar_hf.cli.main import main

PACKAGE = Path(oscar_hf.__file__).parent
HEAVY = ("torch", "transformers", "numpy", "safetensors", "huggingface_hub", "tqdm")
# Runs the command line in a process that has imported nothing yet; the last line says what heavy was imported.
COMMAND = f"""
import sys
from oscar_hf.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code or 0
print([name for name in {HEAVY} if name in sys.modules])
sys.exit(code)
"""


def python(code, *arguments, path=()):
    """A fresh interpreter on this package, with folders to look in before others."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), str(PACKAGE.parent)])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


# ------------------------------------------------------------------------------------------------------ laziness
def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, oscar_hf; from oscar_hf import ArtifactError, CacheStateError, OscarError, UnsupportedModelError\n"
        "assert 'OscarCache' in dir(oscar_hf) and oscar_hf.__version__\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    result = python(code)
    assert result.stdout == "[]\n", result.stdout + result.stderr


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["--help"], 0),
        (["--version"], 0),
        (["calibrate", "--help"], 0),
        (["plan", "--help"], 0),
        (["bench", "--help"], 0),
        (["bench", "decode", "--help"], 0),
        (["calibrat"], 2),
        (["calibrate", "model", "-o", "out", "--tokens", "0"], 2),
        (["calibrate", "model", "-o", "out", "--recipe", "papr"], 2),
        (["plan", "model", "--json", "no/such/folder/plan.json"], 2),
    ],
)
def test_help_and_wrong_arguments_are_answered_before_anything_heavy_is_imported(arguments, code):
    result = python(COMMAND, *arguments)
    assert result.returncode == code, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_version_has_one_home(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"oscar-hf {oscar_hf.__version__}\n"
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in text and 'path = "oscar_hf/__init__.py"' in text


# ------------------------------------------------------------------------------------------------------ names
def test_every_public_name_is_there():
    assert set(oscar_hf.__all__) <= set(dir(oscar_hf)) and sorted(dir(oscar_hf)) == dir(oscar_hf)
    for name in oscar_hf.__all__:
        value = getattr(oscar_hf, name)
        assert value.__name__ == name and callable(value)
        assert value.__doc__, name
    with pytest.raises(AttributeError, match="'oscar_hf' has no attribute 'OscarCash'"):
        oscar_hf.OscarCash  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'OscarCash'"):
        exec("from oscar_hf import OscarCash")


def test_no_module_takes_the_place_of_a_function():
    for name, home in oscar_hf._HOMES.items():
        module = importlib.import_module(f"oscar_hf.{home}")
        assert getattr(oscar_hf, name) is getattr(module, name)
        assert not (PACKAGE / f"{name}.py").exists() and not (PACKAGE / name).exists()


def test_what_editors_see_is_what_python_gives():
    """The imports that only type checkers run, the table of lazy imports and __all__ name the same things."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and node.test.id == "TYPE_CHECKING"]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == oscar_hf._HOMES
    errors = {"ArtifactError", "CacheStateError", "OscarError", "UnsupportedModelError"}
    assert set(oscar_hf.__all__) == set(seen) | errors
    assert (PACKAGE / "py.typed").is_file()


def documented():
    """Public functions, and public classes with their public methods: (name, docstring)."""
    for name in oscar_hf.__all__:
        value = getattr(oscar_hf, name)
        yield name, inspect.getdoc(value)
        for method, member in vars(value).items() if isinstance(value, type) else ():
            function = getattr(member, "__func__", member)
            if not method.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{method}", inspect.getdoc(function)


def test_public_things_are_documented_with_examples_that_are_python():
    examples = {}
    for name, text in documented():
        assert text, name
        for block in re.findall("```python\n(.*?)```", text, re.DOTALL):
            examples[name] = ast.parse(textwrap.dedent(block))
    functions = {name for name in oscar_hf._HOMES if inspect.isfunction(getattr(oscar_hf, name))}
    assert functions - {"register_attention"} | {"Artifact.load", "OscarCache", "OscarConfig"} <= set(examples)


# ------------------------------------------------------------------------------------------------------ requirements
@pytest.fixture
def old_transformers(tmp_path):
    """A folder with a transformers that is too old to have what is imported from it."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("__version__ = '4.57.0'\n")
    (tmp_path / "transformers-4.57.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.0\n"
    (tmp_path / "transformers-4.57.0.dist-info" / "METADATA").write_text(metadata)
    return tmp_path


def test_too_old_a_transformers_is_one_sentence(old_transformers):
    code = (
        "import oscar_hf\n"
        "for name in ('OscarCache', 'deferred_stop', 'plan'):\n"
        "    try:\n"
        "        getattr(oscar_hf, name)\n"
        "    except ImportError as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    result = python(code, path=[old_transformers])
    lines = result.stdout.splitlines()
    assert len(lines) == 3 and len(set(lines)) == 1, result.stdout + result.stderr
    assert lines[0].startswith("ImportError oscar_hf needs transformers") and "(4.57.0 is installed)" in lines[0]
    assert "5.15" in lines[0] and "pip install" in lines[0]


def test_the_command_says_so_in_one_line(old_transformers):
    result = python(COMMAND, "plan", "somewhere", path=[old_transformers])
    assert result.returncode == 2 and result.stderr.startswith("oscar-hf: oscar_hf needs transformers")
    assert result.stderr.count("\n") == 1


def test_other_import_errors_stay_what_they_are(monkeypatch):
    def fail(name, package):
        raise ImportError("something else is broken")

    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.delitem(vars(oscar_hf), "OscarCache", raising=False)
    with pytest.raises(ImportError, match="^something else is broken$"):
        oscar_hf.OscarCache  # noqa: B018


def test_what_is_missing_is_named(monkeypatch):
    assert requirements.problem() == ""
    monkeypatch.setattr(requirements, "_installed", lambda name: None if name == "safetensors" else "9999")
    sentence = requirements.problem()
    assert "safetensors>=" in sentence and "nothing is installed" in sentence and "transformers" in sentence
    assert "torch" not in sentence and "ruff" not in sentence, "neither what is new enough nor what extras need"
