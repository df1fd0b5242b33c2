"""Rows of a cache's batch: chosen, reordered, repeated, all layers or none."""

from torch import Tensor

from ..checks import check_whole_number
from . import native_layers
from .layer import OscarLayer
from .wholeness import Wholeness


class BatchRows:
    """What a cache of `layers` does to the rows of its batch. A part of OscarCache, before transformers' Cache."""

    layers: list
    _whole: Wholeness

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` of the batch (integers, or a bool mask)."""
        rows = self._rows()
        if rows is None:
            return
        indices = native_layers.row_indices(indices, rows)
        with self._whole.changing("selection of rows"):
            for layer in self.layers:
                if isinstance(layer, OscarLayer):
                    layer.batch_select_indices(indices)
                else:
                    native_layers.select_rows(layer, indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Gather rows of the batch."""
        rows = self._rows()
        if rows is None:
            return
        beam_idx = native_layers.row_indices(beam_idx, rows)
        with self._whole.changing("reordering of beams"):
            for layer in self.layers:
                layer.reorder_cache(beam_idx)

    def _rows(self) -> int | None:
        """Rows of the batch that is held, None for an empty cache."""
        for layer in self.layers:
            if isinstance(layer, OscarLayer):
                if layer.store.held:
                    return layer.store.batch_size
            elif tensors := native_layers.tensors_of(layer):
                return tensors[0].shape[0]
        return None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch `repeats` times."""
        check_whole_number("batch_repeat_interleave", repeats, minimum=1)
        with self._whole.changing("repetition of rows"):
            for layer in self.layers:
                if isinstance(layer, OscarLayer):
                    layer.batch_repeat_interleave(repeats)
                else:
                    native_layers.repeat_rows(layer, repeats)
