"""Side: the keys or the values of one layer, and how its rows are transformed and quantized."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .packed_rows import PackedRows
from .quantizer import ScaleRule


@dataclass(frozen=True)
class SideFormat:
    """How the rows of a side are stored: head dim, channels per scale, whether there is no min, the rule that chooses scales,
    whether rows are stored as they are (no transform), tokens per block that has a center of its own (0: none), and whether
    one mean is the center of all rows."""

    dim: int
    group_size: int
    symmetric: bool
    rule: ScaleRule
    is_identity: bool = False
    center_block: int = 0
    has_mean: bool = False

    def new_rows(self, batch: int, heads: int, device, capacity: int = 0) -> PackedRows:
        """An empty store of such rows."""
        return PackedRows(batch, heads, self.dim, self.group_size, self.symmetric, device, capacity, self.center_block)

    @property
    def bits(self) -> float:
        """Bits per packed element, scale, min and center included."""
        center = 16 / self.center_block if self.center_block else 0
        return 2 + (16 if self.symmetric else 32) / self.group_size + center


@dataclass
class Side:
    """The keys or the values of one layer.

    rows: the packed history. transform, inverse: float32 [D, D] or [H, D, D], x_rot = (x - center) @ transform and
    x = x_rot @ inverse + center; None for the identity. The center of a row is that of its block where `rows` has centers, else
    mean: float32 [H, D] or None. metric: what an error of a stored row costs, as transform, for a weighted rule. sink
    [B, H, S, D] and ring [B, H, R, D]: the exact windows in the model's dtype, dense rows; None where there are no windows.
    """

    format: SideFormat
    rows: PackedRows
    transform: Tensor | None = None
    inverse: Tensor | None = None
    mean: Tensor | None = None
    metric: Tensor | None = None
    sink: Tensor | None = None
    ring: Tensor | None = None

    @property
    def rule(self) -> ScaleRule:
        """How scales are chosen."""
        return self.format.rule

    @property
    def dim(self) -> int:
        """Head dim."""
        return self.format.dim

    @property
    def center_block(self) -> int:
        """Tokens of history that share a center of their own, 0 where none do."""
        return self.rows.center_block

    @property
    def query_transform(self) -> Tensor | None:
        """What a query is multiplied by to meet stored keys: the inverse's transpose, None for the identity."""
        return None if self.inverse is None else self.inverse.mT

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Side":
        """The side with `function(tensor)` for every tensor that belongs to the sequence: gathers over the batch, moves."""
        return dataclasses.replace(
            self, rows=self.rows.mapped(function), sink=function(self.sink), ring=function(self.ring)
        )
