"""The house itself: imports go downstairs only, and files stay short."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "oscar_hf"
MAX_LINES = 500
# Rooms from the ground up (ARCHITECTURE.md says what each is for). Rooms of one floor do not import one another.
FLOORS = [
    {"errors"},
    {"checks", "defaults", "dtypes", "masks", "requirements", "saving"},
    {"quantization"},
    {"kernels", "artifact", "transformers_compat"},
    {"storage"},
    {"attention"},
    {"cache"},
    {"calibration"},
    {"bench"},
    {"cli"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def modules():
    return sorted(ROOT.rglob("*.py"))


def imports(path):
    """Dotted names inside oscar_hf that a file imports anywhere, type hints and functions included."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = base + tuple((node.module or "").split(".") if node.module else ())
            yield from ((*target, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oscar_hf"):
            yield tuple(node.module.split(".")[1:]) + (node.names[0].name,)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downstairs(path):
    room = path.relative_to(ROOT).with_suffix("").parts[0]
    if room == "__init__":
        return
    assert room in FLOOR_OF, f"{room} has no floor: give it one here and in ARCHITECTURE.md"
    for target in imports(path):
        if target[0] != room and target[0] in FLOOR_OF:
            assert FLOOR_OF[target[0]] < FLOOR_OF[room], (
                f"{path.name} imports {'.'.join(target)}, which is not below it"
            )


def test_no_circles_inside_a_room():
    """Modules of a room may import one another, but never in a circle."""
    names = {p.relative_to(ROOT).with_suffix("").parts: p for p in modules()}
    edges = {}
    for parts, path in names.items():
        found = set()
        for target in imports(path):
            for candidate in (target, target[:-1]):
                if candidate in names and candidate != parts:
                    found.add(candidate)
                    break
        edges[parts] = found
    done, path_now = set(), []

    def visit(node):
        if node in path_now:
            raise AssertionError("circle: " + " -> ".join("/".join(n) for n in path_now[path_now.index(node) :]))
        if node not in done:
            path_now.append(node)
            for other in edges[node]:
                visit(other)
            path_now.pop()
            done.add(node)

    for node in edges:
        visit(node)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{path.name} has {lines} lines: split it by job"
