"""Draw the plots of docs/quality.md from quality.json: KL over position, KL over bits, retrieval by length and depth."""

import json
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
# Name in the legend, where the row stands in quality.json, and how its line looks.
ROWS = [
    ("quanto, 4 bits", "rivals", "QuantizedCache, quanto, 4 bits", dict(color="#999999", ls=":", marker="v")),
    (
        "published rotations and storage",
        "steps",
        "paper, published storage",
        dict(color="#555555", ls="--", marker="x"),
    ),
    ("fp8 e4m3", "rivals", "fp8 e4m3", dict(color="#cc8800", ls="-.", marker="d")),
    ("KIVI-like, groups of 128", "rivals", "KIVI, 2 bits, groups of 128", dict(color="#a04040", marker="s")),
    ("KIVI-like, groups of 32", "rivals", "KIVI, 2 bits, groups of 32", dict(color="#d06060", marker="s")),
    ("published rotations, our storage", "steps", "paper, calibrated on 2048", dict(color="#6a9fd8", marker="o")),
    ("OscarCache, hadamard", "rivals", "hadamard", dict(color="#3a6fb0", marker="o")),
    ("OscarCache, default", "rivals", "default", dict(color="#0b3d78", marker="o", lw=2)),
]
AXIS = "KL from the exact cache, nats"


def over_position(found: dict) -> None:
    """KL by position."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2), dpi=140)
    for name, part, row, look in ROWS:
        kl = found[part][row]["kl_by_position"]
        label = f"{name} ({found[part][row]['bits']:.2f} bits)"
        axes.plot([int(place) for place in kl], list(kl.values()), label=label, ms=4, **look)
    axes.set(xscale="log", yscale="log", xlabel="position", ylabel=AXIS)
    axes.set_xticks([2048, 4096, 8192, 16384, 24576], ["2K", "4K", "8K", "16K", "24K"])
    _finish(figure, axes, "quality_kl.png")


def over_bits(found: dict) -> None:
    """KL by stored bits per element."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2), dpi=140)
    for name, part, row, look in ROWS:
        axes.plot(found[part][row]["bits"], found[part][row]["kl"], label=name, ms=6, **look | {"ls": ""})
    axes.set(yscale="log", xlabel="bits per stored element", ylabel=f"{AXIS}, 2K to 32K")
    _finish(figure, axes, "quality_bits.png")


def by_depth(found: dict) -> None:
    """Needles found, by length of the prompt and by depth."""
    rows = found["retrieval"]["by_depth"]
    lengths, depths = (list(dict.fromkeys(row[name] for row in rows)) for name in ("length", "depth"))
    figure, panels = plt.subplots(1, 2, figsize=(7.2, 2.6), dpi=140, sharey=True)
    for axes, cache in zip(panels, ("exact", "recipe default")):
        table = [[next(r[cache] for r in rows if (r["length"], r["depth"]) == (n, d)) for n in lengths] for d in depths]
        axes.imshow(table, vmin=50, vmax=100, cmap="RdYlGn", aspect="auto")
        for y, line in enumerate(table):
            for x, value in enumerate(line):
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(lengths)), [f"{n // 1024}K" for n in lengths])
        axes.set_yticks(range(len(depths)), depths)
        axes.set(title={"exact": "exact cache"}.get(cache, "OscarCache, default"), xlabel="tokens")
    panels[0].set_ylabel("depth of the needle")
    figure.tight_layout()
    figure.savefig(HERE / "quality_retrieval.png")


def _finish(figure, axes, name: str) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(HERE / name)


if __name__ == "__main__":
    content = json.loads((HERE / "quality.json").read_text(encoding="utf-8"))
    over_position(content)
    over_bits(content)
    by_depth(content)
