"""Tables and files of results: Markdown rows as they come, and JSON without NaN."""

import json
import math
from collections.abc import Callable

# (title, key of the row, format); a missing or undefined value is shown as a dash.
Column = tuple[str, str, str | Callable]


def cell(value, form: str | Callable) -> str:
    """One value in a form such as `.2f`."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return form(value) if callable(form) else format(value, form)


def table(rows: list[dict], columns: list[Column], header: bool = True) -> str:
    """A Markdown table of rows. What stopped a row, its `problem`, takes the place of its first missing value."""
    lines = []
    if header:
        lines.append("| " + " | ".join(title for title, _, _ in columns) + " |")
        lines.append("| " + " | ".join("---" for _ in columns) + " |")
    for row in rows:
        cells = [cell(row.get(key), form) for _, key, form in columns]
        if row.get("problem") and "-" in cells:
            cells[cells.index("-")] = row["problem"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_json(result: dict, path: str) -> None:
    """Write a result; values that JSON has no word for become null."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(_plain(result), file, indent=2, allow_nan=False)


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
