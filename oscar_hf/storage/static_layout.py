"""One flat buffer for all that a static store holds, and the text that says what lies where.

A compiled model checks each tensor that it reads outside of its graph before every step, and a layer has two dozen: as one
buffer and one string they cost what a single tensor costs.
"""

import dataclasses
import functools
import json
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..artifact.layer_constants import LayerConstants
from ..kernels.decode_step import COUNTERS, HISTORY, LENGTH
from ..quantization.kv_side import Side, SideFormat
from ..quantization.packed_rows import PackedRows, packed_shapes
from ..quantization.quantizer import ScaleRule

# Kernels load up to 16 bytes at a time, and caches work in lines of 128.
_ALIGN = 256


class Region(NamedTuple):
    """Where a tensor lies in the flat buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    def view(self, storage: Tensor) -> Tensor:
        """The tensor inside a buffer."""
        return storage[self.begin : self.begin + self.nbytes].view(self.dtype).view(self.shape)


@dataclass
class StaticRegions:
    """A static store's tensors as views of its buffer: the two sides; counters, int32 [COUNTERS], see
    kernels/decode_step.py; start, int32 [B], the first real slot of each row."""

    keys: Side
    values: Side
    counters: Tensor
    start: Tensor

    @property
    def length(self) -> Tensor:
        """Slots held, int32 [1]."""
        return self.counters[LENGTH : LENGTH + 1]

    @property
    def history(self) -> Tensor:
        """Slots packed, int32 [1]."""
        return self.counters[HISTORY : HISTORY + 1]

    def tensors(self) -> list[Tensor]:
        """Everything that belongs to the sequence, but for counters and start."""
        return [
            tensor for side in (self.keys, self.values) for tensor in (*side.rows.named.values(), side.sink, side.ring)
        ]


@dataclass(frozen=True)
class Layout:
    """Geometry and rules of a static store: all that its operators must know besides the two buffers.

    capacity: packed tokens that fit; limit: tokens that fit in all; constants: kind of each constant in the order of
    FLAT_ORDER, "-" for none, "s" for one that the KV heads share, "h" for one per head.
    """

    batch: int
    heads: int
    keys: SideFormat
    values: SideFormat
    sink: int
    ring: int
    recent: int
    capacity: int
    limit: int
    dtype_name: str
    constants: str

    @functools.cached_property
    def spec(self) -> str:
        """The layout as the text that operators take: JSON, so that fields go by name. It must mean the same in every process,
        for compiled graphs are cached on disk with it."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def parse(spec: str) -> "Layout":
        """The layout that a spec stands for."""
        fields = json.loads(spec)
        for name in ("keys", "values"):
            form = fields[name]
            fields[name] = SideFormat(**{**form, "rule": ScaleRule(**form["rule"])})
        return Layout(**fields)

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return getattr(torch, self.dtype_name)

    @functools.cached_property
    def _regions(self) -> dict[str, Region]:
        """Where each tensor lies; one that is left out is missing."""
        kinds, forms = {}, {"keys": self.keys, "values": self.values}
        for name, form in forms.items():
            shapes = packed_shapes(
                self.batch, self.heads, form.dim, form.group_size, form.symmetric, self.capacity, form.center_block
            )
            kinds |= {f"{name}.{tensor}": kind for tensor, kind in shapes.items()}
        for window, size in (("sink", self.sink), ("ring", self.ring)):
            for name, form in forms.items():
                kinds[f"{name}.{window}"] = (self.dtype, (self.batch, self.heads, size, form.dim))
        kinds["counters"] = (torch.int32, (COUNTERS,))
        kinds["start"] = (torch.int32, (self.batch,))
        placed, at = {}, 0
        for name, (dtype, shape) in kinds.items():
            placed[name] = Region(dtype, shape, at, math.prod(shape) * dtype.itemsize)
            at += -(-placed[name].nbytes // _ALIGN) * _ALIGN
        return placed

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer."""
        last = self._regions["start"]
        return last.begin + -(-last.nbytes // _ALIGN) * _ALIGN

    def new_storage(self, device: torch.device) -> Tensor:
        """A zeroed buffer, uint8: unused capacity must never hold a NaN that 0 * NaN would let through."""
        return torch.zeros(self.nbytes, dtype=torch.uint8, device=device)

    def open(self, storage: Tensor, constants: LayerConstants) -> StaticRegions:
        """The tensors inside a buffer, with the constants that their rows are transformed by."""

        views = {name: region.view(storage) for name, region in self._regions.items()}

        def side(kind: str, name: str, form: SideFormat) -> Side:
            own = {full.partition(".")[2]: view for full, view in views.items() if full.startswith(f"{name}.")}
            windows = {window: own.pop(window) for window in ("sink", "ring")}
            return Side(
                form, PackedRows.of(own, form.dim, form.center_block), **constants.of_side(kind, form), **windows
            )

        sides = side("key", "keys", self.keys), side("value", "values", self.values)
        return StaticRegions(*sides, views["counters"], views["start"])

    def counters(self, storage: Tensor) -> Tensor:
        """The counters alone inside a buffer."""
        return self._regions["counters"].view(storage)

    def constant_views(self, flat: Tensor) -> LayerConstants:
        """The constants inside their flat buffer, float32."""
        return LayerConstants.from_flat(flat, self.constants, self.heads, self.keys.dim, self.values.dim)
