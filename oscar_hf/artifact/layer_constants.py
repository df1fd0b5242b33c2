"""The calibrated tensors of one layer: transforms, their inverses, key mean, error metric."""

import functools
import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..quantization.kv_side import SideFormat
from ..quantization.quantizer import ScaleRule, feedback_matrix
from ..quantization.rotation import hadamard

# Order of the constants in a flat buffer; matrices first, whose sizes keep what follows aligned.
FLAT_ORDER = ("key_transform", "key_query", "value_transform", "value_inverse", "key_metric", "key_mean")


@dataclass(frozen=True, eq=False)
class LayerConstants:
    """Constants of one layer, float32; [D, D] shared by the KV heads or [H, D, D] per head.

    key_transform A and key_inverse A^-1: k' = (k - key_mean) A, q' = q A^-T. value_transform R and value_inverse.
    key_mean: [H, D] or None. key_metric: M = A^-1 C_Q A^-T, what an error of a stored key row costs, or None; in the constants
    that a store uses it is what the scale rule takes, see `for_rule`.
    """

    key_transform: Tensor
    key_inverse: Tensor
    value_transform: Tensor
    value_inverse: Tensor
    key_mean: Tensor | None = None
    key_metric: Tensor | None = None

    @classmethod
    def data_free(cls, key_kind: str, value_kind: str, key_dim: int, value_dim: int) -> "LayerConstants":
        """Constants that need no calibration: each kind is `hadamard` or `identity`, or `whitened` for keys."""
        make = {"hadamard": hadamard, "identity": lambda dim: torch.eye(dim, dtype=torch.float64)}
        # What a cache whitens by is not known before its first tokens.
        make["whitened"] = hadamard
        key, value = make[key_kind](key_dim).float(), make[value_kind](value_dim).float()
        return cls(key, key.mT, value, value.mT)

    def for_rule(self, rule: ScaleRule) -> "LayerConstants":
        """These constants with the metric as a scale rule of keys takes it: for feedback its `feedback_matrix`."""
        return self._with_feedback if rule.feedback and self.key_metric is not None else self

    @functools.cached_property
    def _with_feedback(self) -> "LayerConstants":
        metric = feedback_matrix(self.key_metric)
        changed = LayerConstants(**{**self.tensors(), "key_metric": metric})
        return changed if metric.device.type == "cpu" else changed.in_one_buffer()

    @property
    def key_dim(self) -> int:
        """Head dim of the keys."""
        return self.key_transform.shape[-1]

    @property
    def value_dim(self) -> int:
        """Head dim of the values."""
        return self.value_transform.shape[-1]

    @functools.cached_property
    def key_query(self) -> Tensor:
        """A^-T, what queries are multiplied by; contiguous on a GPU, where it lies in the flat buffer."""
        return self.key_inverse.mT

    @functools.cached_property
    def flat(self) -> tuple[Tensor, str]:
        """All constants as one float32 buffer, and the kind of each in FLAT_ORDER: "-" absent, "s" shared by the heads, "h" one
        per head."""
        named = [(name, getattr(self, name)) for name in FLAT_ORDER]
        kinds = "".join(
            "-" if tensor is None else "s" if tensor.dim() == 2 and name != "key_mean" else "h"
            for name, tensor in named
        )
        return torch.cat([tensor.reshape(-1) for _, tensor in named if tensor is not None]), kinds

    @classmethod
    def from_flat(cls, flat: Tensor, kinds: str, heads: int, key_dim: int, value_dim: int) -> "LayerConstants":
        """Constants that are views of what `flat` gave."""
        found, at = dict.fromkeys(FLAT_ORDER), 0
        for name, kind in zip(FLAT_ORDER, kinds):
            if kind == "-":
                continue
            dim = value_dim if name.startswith("value") else key_dim
            shape = (heads, dim) if name == "key_mean" else (dim, dim) if kind == "s" else (heads, dim, dim)
            found[name] = flat[at : at + math.prod(shape)].view(shape)
            at += math.prod(shape)
        query = found.pop("key_query")
        constants = cls(key_inverse=query.mT, **found)
        # Contiguous as it is, where key_query would make a copy.
        vars(constants)["key_query"] = query
        return constants

    def in_one_buffer(self) -> "LayerConstants":
        """The same constants as views of one buffer, their `flat`."""
        flat, kinds = self.flat
        heads = next((t.shape[0] for n, t in self.tensors().items() if n == "key_mean" or t.dim() == 3), 1)
        constants = LayerConstants.from_flat(flat, kinds, heads, self.key_dim, self.value_dim)
        vars(constants)["flat"] = (flat, kinds)
        return constants

    def of_side(self, kind: str, form: SideFormat) -> dict[str, Tensor | None]:
        """transform, inverse, mean and metric of keys (kind "key") or values ("value"), as `quantization.kv_side.Side` takes them;
        a transform that is the identity, and a mean that is not asked for, are left out."""
        is_key = kind == "key"
        return {
            "transform": None if form.is_identity else getattr(self, f"{kind}_transform"),
            "inverse": None if form.is_identity else getattr(self, f"{kind}_inverse"),
            "mean": self.key_mean if form.has_mean else None,
            "metric": self.key_metric if is_key else None,
        }

    @property
    def storages(self) -> dict[int, int]:
        """Bytes of all memory in use, by what tells it apart: tensors, and layers, may share some."""
        cached = [vars(self)["key_query"]] if "key_query" in vars(self) else []
        tensors = [*self.tensors().values(), *cached, *([self.flat[0]] if "flat" in vars(self) else [])]
        # Not by address: on the meta device, where plans are made, all have the address 0.
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, what they share counted once."""
        return sum(self.storages.values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors present, by field name."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: tensor for name, tensor in named if tensor is not None}

    def to(self, device: torch.device) -> "LayerConstants":
        """The same constants on another device; on the CPU an inverse may stay a view of its transform."""
        moved = LayerConstants(**{name: tensor.to(device) for name, tensor in self.tensors().items()})
        return moved if torch.device(device).type == "cpu" else moved.in_one_buffer()

    def __deepcopy__(self, memo):
        # Constants never change and belong to the model, not to a sequence: copies of a cache share them.
        return self
