"""MemoryReport: where the bytes of a cache are."""

from dataclasses import dataclass, field

from .layer import OscarLayer
from .native_layers import tensors_of

REGIONS = ("sink", "recent", "codes", "scale_min", "centers", "constants", "native")


@dataclass
class LayerMemory:
    """Bytes of one layer by region; tokens held and the elements (keys and values together) that they stand for."""

    index: int
    kind: str
    tokens: int
    elements: int
    regions: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(self.regions.values())


@dataclass
class MemoryReport:
    """Allocated bytes of a cache, unused capacity included; `print` it for a table.

    Attributes:
        layers (`list[LayerMemory]`):
            One entry per layer. Regions are sink, recent, codes, scale_min, centers, constants and native. `constants` of an
            artifact are per model: every cache on one device shares them; what a cache learned from its prompt is its own.
            `native` are the layers of transformers' own classes.

    Example:

    ```python
    report = cache.memory_report()
    print(f"{report.ratio:.1f}x smaller than BF16, {report.bits_per_element:.2f} bits per element")
    ```
    """

    layers: list[LayerMemory]

    @property
    def by_region(self) -> dict[str, int]:
        """Bytes by region over all layers."""
        return {name: sum(layer.regions.get(name, 0) for layer in self.layers) for name in REGIONS}

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers, constants included."""
        return sum(layer.total_bytes for layer in self.layers)

    @property
    def bf16_bytes(self) -> int:
        """Bytes of the same tokens in BF16."""
        return 2 * sum(layer.elements for layer in self.layers)

    @property
    def ratio(self) -> float:
        """bf16_bytes / total_bytes; 0 for an empty cache."""
        return self.bf16_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def bits_per_element(self) -> float:
        """Bits per cached element of the layers that are ours, windows, scale and min included, constants not."""
        ours = [layer for layer in self.layers if layer.kind == "oscar"]
        elements = sum(layer.elements for layer in ours)
        stored = sum(layer.total_bytes - layer.regions.get("constants", 0) for layer in ours)
        return 8 * stored / elements if elements else 0.0

    def __str__(self) -> str:
        lines = [
            f"{'layer':>6} {'kind':<8}{'tokens':>8} " + "".join(f"{name:>12}" for name in REGIONS) + f"{'total':>12}"
        ]
        rows = [
            (str(layer.index), layer.kind, str(layer.tokens), layer.regions, layer.total_bytes) for layer in self.layers
        ]
        # A model has dozens of equal layers: say it once.
        groups: list[list] = []
        for row in rows:
            if groups and groups[-1][0][1:] == row[1:]:
                groups[-1].append(row)
            else:
                groups.append([row])
        for group in groups:
            index, kind, tokens, regions, total = group[0]
            label = index if len(group) == 1 else f"{index}-{group[-1][0]}"
            cells = "".join(f"{_mib(regions.get(name, 0)):>12}" for name in REGIONS)
            each = "" if len(group) == 1 else " each"
            lines.append(f"{label:>6} {kind:<8}{tokens:>8} {cells}{_mib(total):>12}{each}")
        cells = "".join(f"{_mib(self.by_region[name]):>12}" for name in REGIONS)
        lines.append(f"{'total':>6} {'':<16} {cells}{_mib(self.total_bytes):>12}")
        if not self.bf16_bytes:
            lines.append("empty")
        else:
            change = f"{self.ratio:.2f}x smaller" if self.ratio >= 1 else f"{1 / self.ratio:.2f}x larger"
            lines.append(
                f"BF16 would take {_mib(self.bf16_bytes)}: {change}, {self.bits_per_element:.2f} bits per element without "
                "constants"
            )
        return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


def layer_memory(index: int, layer) -> LayerMemory:
    """Bytes of one layer, ours or transformers' own; what waits must be placed."""
    if isinstance(layer, OscarLayer):
        if not layer.is_initialized:
            return LayerMemory(index, "oscar", 0, 0)
        store = layer.store
        batch, heads, key_dim, value_dim = store.geometry
        tokens = store.tokens
        return LayerMemory(index, "oscar", tokens, tokens * batch * heads * (key_dim + value_dim), store.region_bytes())
    tensors = tensors_of(layer)
    tokens = layer.get_seq_length() if hasattr(layer, "get_seq_length") and tensors else 0
    elements, nbytes = sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)
    return LayerMemory(index, "native", int(tokens), elements, {"native": nbytes})
