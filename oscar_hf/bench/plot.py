"""Figures of results: one line per cache, or one group of bars per shape. matplotlib is needed only here."""

from collections.abc import Callable
from pathlib import Path

from ..errors import OscarError


def require_plot(path: str) -> None:
    """Raise OscarError unless a figure can be drawn to `path`: asked before a run, not after it."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise OscarError("--plot needs matplotlib: pip install 'oscar-hf[bench]'") from error
    known = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in known:
        raise OscarError(f"--plot {path!r}: the name must end with .png or another of {', '.join(sorted(known))}")


def plot_decode(result: dict, path: str) -> None:
    """ms per token over context; of the largest batches the batch and its tokens per second over context, too."""
    deferred = [
        {"cache": f"{row['cache']}, deferred stop", "context": row["context"], "ms_per_token": row["deferred_ms"]}
        for row in result["rows"]
        if row.get("deferred_ms") is not None
    ]
    result = result | {"rows": result["rows"] + deferred}
    panels = [("ms_per_token", "ms per token")]
    if result["find_batch"]:
        panels += [("batch", "largest batch that fits"), ("tokens_per_s", "tokens per second")]
    _lines(result, path, "context", panels)


def plot_prefill(result: dict, path: str) -> None:
    """Seconds and peak GiB over the number of tokens in the end, one line per cache and turn."""

    def label(row):
        return row["cache"] + (f", {row['new_tokens']} on a history" if row["history"] else "")

    rows = [row | {"tokens": row["history"] + row["new_tokens"]} for row in result["rows"]]
    panels = [("seconds", "seconds"), ("peak_gib", "peak GiB beyond the model")]
    _lines(result | {"rows": rows}, path, "tokens", panels, label)


def plot_kernel(result: dict, path: str) -> None:
    """Microseconds of every kernel, a group of bars per shape, logarithmic."""
    names = {
        "oscar_us": "OSCAR",
        "cudnn_us": "cuDNN BF16",
        "flash_us": "flash BF16",
        "dequantize_sdpa_us": "dequantize + SDPA",
    }
    figure, (axes,) = _figure(result, 1, 2 + 1.4 * len(result["rows"]))
    width = 0.8 / len(names)
    for number, (key, label) in enumerate(names.items()):
        points = [(i, row[key]) for i, row in enumerate(result["rows"]) if row.get(key) is not None]
        axes.bar([i + (number - 1.5) * width for i, _ in points], [t for _, t in points], width, label=label)
    axes.set_xticks(
        range(len(result["rows"])), [row["shape"].replace(", ", "\n") for row in result["rows"]], fontsize=7
    )
    axes.set_yscale("log")
    axes.set_ylabel("microseconds")
    axes.legend()
    figure.savefig(path)


def _lines(result: dict, path: str, x: str, panels: list[tuple[str, str]], label: Callable = lambda row: row["cache"]):
    figure, all_axes = _figure(result, len(panels), 5.5)
    rows = [row for row in result["rows"] if not row.get("problem")]
    for axes, (key, title) in zip(all_axes, panels):
        for name in dict.fromkeys(map(label, rows)):
            points = [(row[x], row[key]) for row in rows if label(row) == name and row.get(key) is not None]
            if points:
                axes.plot(*zip(*sorted(points)), marker="o", label=name)
        axes.set_xlabel(x)
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(path)


def _figure(result: dict, panels: int, width: float):
    # Figure itself, not pyplot: no window system, and nothing global.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * panels, 4.5), layout="constrained", dpi=150)
    info = result["machine"]
    figure.suptitle(
        f"{info['gpu']}, torch {info['torch']}, transformers {info['transformers']}, {info['date']}", fontsize=8
    )
    return figure, figure.subplots(1, panels, squeeze=False)[0]
