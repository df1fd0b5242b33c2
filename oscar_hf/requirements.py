"""Which of the packages that this one needs are missing, or of a version that it does not work with."""

from importlib import metadata


def problem() -> str:
    """What is needed, what is installed and what to run, in one sentence; empty where nothing is wrong.

    The requirements are those of the installed package, so that pyproject.toml stays their one home.
    """
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(line) for line in metadata.requires("oscar-hf") or ()]
    except metadata.PackageNotFoundError:
        # A source tree on the path that was never installed.
        return ""
    wrong = {}
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _installed(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong[f"{requirement.name}{requirement.specifier}"] = version or "nothing"
    if not wrong:
        return ""
    found = ", ".join(f"{name} ({version} is installed)" for name, version in wrong.items())
    return f"oscar_hf needs {found}: run pip install {' '.join(map(repr, wrong))}"


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
