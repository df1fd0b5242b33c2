"""Padding: where each row of a batch begins.

    UNKNOWN    no mask has been seen yet; rows count as beginning at slot 0
    LEARNING   a mask has been seen, and some row is still inside its padding: the next call tells more
    SETTLED    every row's first real slot is known, from masks, from `set_padding`, or because no mask came at all

Rows settle once and for all when tokens are placed: what lies before a row's start is not kept exactly.
"""

import enum

import torch
from torch import Tensor


class PaddingState(enum.Enum):
    """What is known of the padding, see the module's text."""

    UNKNOWN = "unknown"
    LEARNING = "learning"
    SETTLED = "settled"


class Padding:
    """The first real slot of each row, `rows` (empty where nothing is padded), and how sure that is, `state`.

    mirror: an int32 [B] tensor that is kept equal to `rows`, for kernels that read it from the device in captured graphs.
    """

    def __init__(self):
        self.mirror: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        """Forget everything, for a new sequence."""
        self.state = PaddingState.UNKNOWN
        self._set([])

    def _set(self, rows: list[int]) -> None:
        # One way to say that nothing is padded, so that nothing has to tell [] from [0, 0].
        self.rows = rows if any(rows) else []
        self._on_device: Tensor | None = None
        self._write_mirror()

    def bind(self, mirror: Tensor | None) -> None:
        """Keep a tensor equal to `rows` from now on."""
        self.mirror = mirror
        self._write_mirror()

    def _write_mirror(self) -> None:
        if self.mirror is None:
            return
        rows = self.rows or [0] * len(self.mirror)
        # Padding that was stated for a batch of another size waits for a mirror of that size.
        if len(rows) == len(self.mirror):
            self.mirror.copy_(torch.tensor(rows, dtype=torch.int32))

    @property
    def is_settled(self) -> bool:
        """Whether every row's start is known."""
        return self.state is PaddingState.SETTLED

    @property
    def is_padded(self) -> bool:
        """Whether some row begins after slot 0."""
        return bool(self.rows)

    @property
    def will_settle(self) -> bool:
        """Whether it is known where rows begin once what waits is placed: if no mask came (flash attention), every row is taken
        to begin at slot 0."""
        return self.state is not PaddingState.LEARNING

    def starts(self, batch: int) -> list[int]:
        """The first real slot of each of `batch` rows."""
        return self.rows or [0] * batch

    def on(self, device: torch.device) -> Tensor | None:
        """`rows` as int32 [B] on a device, None where nothing is padded; copied there once for as long as they stay."""
        if self.mirror is not None:
            return self.mirror
        if not self.rows:
            return None
        if self._on_device is None or self._on_device.device != device:
            self._on_device = torch.tensor(self.rows, dtype=torch.int32, device=device)
        return self._on_device

    # ---------------------------------------------------------------------------------------------- what changes it
    def state_rows(self, rows: list[int]) -> None:
        """Take rows as given, before the first tokens."""
        self.state = PaddingState.SETTLED
        self._set(list(rows))

    def restore(self, rows: list[int] | None, settled: bool) -> None:
        """Take what was saved; rows that had not settled go on learning."""
        self.state = PaddingState.SETTLED if settled else PaddingState.LEARNING
        self._set(list(rows or []))

    def settle(self) -> None:
        """Tokens are about to be placed: rows of which no mask has spoken begin where they are taken to begin."""
        if self.will_settle:
            self.state = PaddingState.SETTLED

    def settle_as_is(self) -> None:
        """A call shows that no row is still inside its padding: what is known stays."""
        self.state = PaddingState.SETTLED

    def learn(self, seen: list[int], placed: int, held: int) -> None:
        """A call that holds `held` slots, `placed` of them before it, shows slot seen[row] as each row's first; `held` where it
        shows none. What an earlier call settled stays: only rows that were still inside their padding are decided now."""
        nothing_known = 0 if self.state is PaddingState.LEARNING else placed
        known = self.rows or [nothing_known] * len(seen)
        rows = [old if old < placed else new for old, new in zip(known, seen)]
        decided = all(row < held for row in rows)
        self.state = PaddingState.SETTLED if decided else PaddingState.LEARNING
        self._set(rows)

    def crop(self, keep: int) -> None:
        """Only `keep` slots are left; a row of which nothing is left but padding begins with whatever comes next."""
        self._set([min(row, keep) for row in self.rows])

    def select(self, indices: list[int]) -> None:
        """Keep the rows `indices` of the batch."""
        self._set([self.rows[i] for i in indices] if self.rows else [])

    def __getstate__(self):
        # Tensors are made anew on whatever device they are asked for; a mirror is bound again by its owner.
        return {"state": self.state, "rows": self.rows}

    def __setstate__(self, state):
        self.__dict__.update(state, mirror=None, _on_device=None)
