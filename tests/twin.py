"""Twin: what an OscarLayer should hold and answer, kept the obvious way, every token in float64.

It keeps the exact rows of all tokens and beside them, made once by the reference quantizer at the moment a token leaves the
exact region, the codes of those that are packed, and for each block of keys the center that its first token got. Everything
else follows: which slots a row reads from where, the dense tensors, attention. It shares the quantizer and the constants with
the package, and none of its storage.
"""

import copy

import torch

from oscar_hf.kernels.decode import MAX_NEW_TOKENS
from oscar_hf.quantization.quantizer import dequantize, quantize_rows
from oscar_hf.storage.waiting_prompt import DRAFT_MARGIN


def coarse(center):
    """A center as this test's storage holds it: on the grid of the rows, so that differences from it are exact."""
    return (center.half().double() * 16).round() / 16


class Twin:
    """The tokens of one layer of a cache; `config` an OscarConfig, `constants` LayerConstants."""

    def __init__(self, config, constants, batch, heads, key_dim, value_dim):
        self.config, self.constants = config, constants
        self.rows = {
            kind: torch.zeros(batch, heads, 0, dim).double() for kind, dim in (("k", key_dim), ("v", value_dim))
        }
        self.codes: dict[str, list] = {"k": [], "v": []}
        self.centers: list = []
        self.placed = self.history = 0
        self.starts, self.starts_known, self.mask_seen = [0] * batch, False, False

    @property
    def batch(self):
        return self.rows["k"].shape[0]

    @property
    def total(self):
        """Slots held, waiting ones included."""
        return self.rows["k"].shape[2]

    @property
    def waiting(self):
        return self.total - self.placed

    def copy(self):
        twin = copy.copy(self)
        twin.rows, twin.codes = dict(self.rows), {kind: list(codes) for kind, codes in self.codes.items()}
        twin.centers = list(self.centers)
        twin.starts = list(self.starts)
        return twin

    # ------------------------------------------------------------------------------------------------ operations
    def update(self, keys, values):
        self.commit()
        waits = self.placed == 0 or keys.shape[2] > DRAFT_MARGIN or not self.starts_known
        for kind, new in (("k", keys), ("v", values)):
            self.rows[kind] = torch.cat([self.rows[kind], new.double()], 2)
        if not waits:
            self._place()

    def commit(self):
        if self.waiting:
            self.starts_known = self.starts_known or not self.mask_seen
            self._place()

    def learn(self, starts):
        """What a mask shows in a call whose tokens wait: rows that begin after its last token are still undecided."""
        if not self.starts_known and self.waiting:
            self.starts, self.mask_seen = [min(start, self.total) for start in starts], True
            self.starts_known = all(start < self.total for start in self.starts)

    def _place(self):
        exact = self.config.recent_tokens - 1 + min(self.waiting, DRAFT_MARGIN)
        history = max(self.history, self.total - self.config.sink_tokens - exact)
        first, block = self.config.sink_tokens, self.config.center_block
        # A step packs before its new tokens are known.
        known = self.total if self.waiting > MAX_NEW_TOKENS else self.placed
        for slot in range(first + self.history, first + history):
            if block and (slot - first) % block == 0:
                self.centers.append(self._center(slot, min(slot + block, known)))
            for kind in "kv":
                self.codes[kind].append(self._quantize(kind, slot))
        self.placed, self.history = self.total, history

    def _center(self, begin, end):
        """Mean key of those of slots begin..end-1 that are no padding, [B, H, D]; 0 where all are."""
        center = torch.zeros_like(self.rows["k"][:, :, 0])
        for row, start in enumerate(self.starts):
            if start < end:
                center[row] = self.rows["k"][row, :, max(begin, start) : end].float().mean(1)
        return coarse(center)

    def _quantize(self, kind, slot):
        config, constants, metric = self.config, self.constants, None
        row = self.rows[kind][:, :, slot : slot + 1].float()
        if kind == "v":
            rule, symmetric, transform = config.value_rule, config.value_symmetric, constants.value_transform
        else:
            rule, symmetric, transform = config.key_rule, config.key_symmetric, constants.key_transform
            metric = constants.for_rule(rule).key_metric
            if config.key_center == "mean":
                row = row - constants.key_mean[:, None]
            elif config.center_block:
                row = row - self.centers[(slot - config.sink_tokens) // config.center_block].float()[:, :, None]
        return quantize_rows(row @ transform, config.group_size_for(row.shape[3]), rule, symmetric, metric)

    def crop(self, count):
        self.commit()
        keep = max(self.total - count, 0)
        if keep == self.total:
            return
        if keep == 0:
            return self.reset()
        self.rows = {kind: rows[:, :, :keep] for kind, rows in self.rows.items()}
        self.placed, self.history = keep, min(self.history, max(0, keep - self.config.sink_tokens))
        self.codes = {kind: codes[: self.history] for kind, codes in self.codes.items()}
        # What is left of a block keeps its center.
        self.centers = self.centers[: -(-self.history // max(1, self.config.center_block))]
        self.starts = [min(start, keep) for start in self.starts]

    def reset(self):
        sizes = [self.rows[kind].shape for kind in "kv"]
        self.__init__(self.config, self.constants, *sizes[0][:2], sizes[0][3], sizes[1][3])

    def select(self, index):
        self.commit()
        self.rows = {kind: rows[index] for kind, rows in self.rows.items()}
        self.codes = {
            kind: [tuple(None if part is None else part[index] for part in token) for token in codes]
            for kind, codes in self.codes.items()
        }
        self.centers = [center[index] for center in self.centers]
        self.starts = [self.starts[i] for i in index]

    # ------------------------------------------------------------------------------------------------ reading
    def packed(self):
        """Which slots are read from the packed copy, bool [B, T]: a row's own sink is exact wherever it begins."""
        slots, sink = torch.arange(self.total), self.config.sink_tokens
        starts = torch.tensor(self.starts)[:, None]
        history = (slots >= sink) & (slots < sink + self.history)
        return history & ~((slots >= starts) & (slots < starts + sink))

    def real(self):
        """Which slots hold a token and not padding, bool [B, T]."""
        return torch.arange(self.total) >= torch.tensor(self.starts)[:, None]

    def stored(self, kind):
        """Codes, scale and min of the history, as PackedRows.read gives them."""
        parts = zip(*self.codes[kind])
        return [None if part[0] is None else torch.cat(part, 2) for part in parts]

    def dense(self, kind):
        """float64 [B, H, T, D] of what a read must give; padding slots are to be ignored."""
        if not self.history:
            return self.rows[kind]
        key = kind == "k"
        inverse = self.constants.key_inverse if key else self.constants.value_inverse
        history = dequantize(*self.stored(kind), dtype=torch.float64) @ inverse.double()
        if key and self.config.key_center == "mean":
            history = history + self.constants.key_mean[:, None].double()
        elif key and self.centers:
            centers = torch.stack(self.centers, 2).repeat_interleave(self.config.center_block, 2)
            history = history + centers[:, :, : self.history]
        dense, sink = self.rows[kind].clone(), self.config.sink_tokens
        dense[:, :, sink : sink + self.history] = history
        return torch.where(self.packed()[:, None, :, None], dense, self.rows[kind])

    def attend(self, query, scale):
        """float64 [B, Hq, M, Dv] of causal attention of the last M tokens, and which queries are real, [B, M]."""
        new, group = query.shape[2], query.shape[1] // self.rows["k"].shape[1]
        keys, values = (self.dense(kind).repeat_interleave(group, 1) for kind in "kv")
        limit = torch.arange(self.total - new, self.total)[:, None]
        seen = (torch.arange(self.total) <= limit)[None] & self.real()[:, None]
        scores = (query.double() @ keys.mT * scale).masked_fill(~seen[:, None], -torch.inf)
        return scores.softmax(-1) @ values, seen.any(-1)
