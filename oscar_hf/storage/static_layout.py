"""One flat buffer for all that a static layer stores, and the text that says what lies where.

A compiled model checks each tensor that it reads outside of its graph before every step, and a layer has two dozen: as one
buffer and one string they cost what a single tensor costs.
"""

import ast
import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..artifact.layer_constants import LayerConstants
from ..kernels.step import COUNTERS
from ..quantization.packed_rows import tokens_per_row
from ..quantization.quantizer import ScaleRule

# Kernels load up to 16 bytes at a time, and caches work in lines of 128.
_ALIGN = 256


class StoredTensors(NamedTuple):
    """What a static layer stores, as `kernels.decode.DecodeStore` describes it; mins None where symmetric.

    counters: int32 [COUNTERS], see kernels/step.py; start: int32 [B], first real slot of each row.
    """

    k_codes: Tensor
    k_scale: Tensor
    k_min: Tensor | None
    v_codes: Tensor
    v_scale: Tensor
    v_min: Tensor | None
    sink_k: Tensor
    sink_v: Tensor
    ring_k: Tensor
    ring_v: Tensor
    counters: Tensor
    start: Tensor


@dataclass(frozen=True)
class Layout:
    """Geometry and rules of a static layer: all that its operators must know besides the two buffers.

    capacity: packed tokens that fit; limit: tokens that fit in all; *_is_identity: whether the transform is left out;
    constants: kind of each constant in the order of FLAT_ORDER, "-" for none, "s" for one that the KV heads share, "h" for
    one per head.
    """

    batch: int
    heads: int
    key_dim: int
    value_dim: int
    sink: int
    ring: int
    recent: int
    capacity: int
    limit: int
    key_group: int
    value_group: int
    key_symmetric: bool
    value_symmetric: bool
    key_rule_name: str
    value_rule_name: str
    key_is_identity: bool
    value_is_identity: bool
    dtype_name: str
    constants: str

    @functools.cached_property
    def spec(self) -> str:
        """The layout as the text that operators take."""
        return repr(dataclasses.astuple(self))

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def parse(spec: str) -> "Layout":
        """The layout that a spec stands for."""
        return Layout(*ast.literal_eval(spec))

    @functools.cached_property
    def key_rule(self) -> ScaleRule:
        """How key scales are chosen."""
        return ScaleRule.parse(self.key_rule_name)

    @functools.cached_property
    def value_rule(self) -> ScaleRule:
        """How value scales are chosen."""
        return ScaleRule.parse(self.value_rule_name)

    @functools.cached_property
    def _regions(self) -> tuple:
        """(dtype, shape, first byte, bytes) of each stored tensor, None for one that is left out."""
        dtype, rows = getattr(torch, self.dtype_name), (self.batch, self.heads)

        def packed(dim, group, symmetric):
            per_row = tokens_per_row(dim)
            qparams = (torch.float16, (*rows, self.capacity, dim // group))
            codes = (torch.int16, (*rows, self.capacity // per_row, dim // 8 * per_row))
            return codes, qparams, None if symmetric else qparams

        kinds = (
            *packed(self.key_dim, self.key_group, self.key_symmetric),
            *packed(self.value_dim, self.value_group, self.value_symmetric),
            *(
                (dtype, (*rows, count, dim))
                for count in (self.sink, self.ring)
                for dim in (self.key_dim, self.value_dim)
            ),
            (torch.int32, (COUNTERS,)),
            (torch.int32, (self.batch,)),
        )
        placed, at = [], 0
        for kind in kinds:
            if kind is None:
                placed.append(None)
                continue
            size = math.prod(kind[1]) * kind[0].itemsize
            placed.append((*kind, at, size))
            at += -(-size // _ALIGN) * _ALIGN
        return tuple(placed)

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer."""
        last = self._regions[-1]
        return last[2] + -(-last[3] // _ALIGN) * _ALIGN

    def new_storage(self, device: torch.device) -> Tensor:
        """A zeroed buffer, uint8: unused capacity must never hold a NaN that 0 * NaN would let through."""
        return torch.zeros(self.nbytes, dtype=torch.uint8, device=device)

    def views(self, storage: Tensor) -> StoredTensors:
        """The stored tensors inside a buffer."""
        return StoredTensors(
            *(None if r is None else storage[r[2] : r[2] + r[3]].view(r[0]).view(r[1]) for r in self._regions)
        )

    def constant_views(self, flat: Tensor) -> LayerConstants:
        """The constants inside their flat buffer, float32."""
        return LayerConstants.from_flat(flat, self.constants, self.heads, self.key_dim, self.value_dim)
