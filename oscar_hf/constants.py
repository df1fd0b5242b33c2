"""The calibrated tensors of one layer: transforms, their inverses, key mean, error metric."""

import functools
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .rotation import hadamard


@dataclass(frozen=True, eq=False)
class LayerConstants:
    """Constants of one layer, float32; [D, D] shared by the KV heads or [H, D, D] per head.

    key_transform A and key_inverse A^-1: k' = (k - key_mean) A, q' = q A^-T. value_transform R and value_inverse.
    key_mean: [H, D] or None. key_metric: M = A^-1 C_Q A^-T, what an error of a stored key row costs, or None.
    """

    key_transform: Tensor
    key_inverse: Tensor
    value_transform: Tensor
    value_inverse: Tensor
    key_mean: Tensor | None = None
    key_metric: Tensor | None = None

    @classmethod
    def data_free(cls, key_kind: str, value_kind: str, key_dim: int, value_dim: int) -> "LayerConstants":
        """Constants that need no calibration: each kind is `hadamard` or `identity`."""
        make = {"hadamard": hadamard, "identity": lambda dim: torch.eye(dim, dtype=torch.float64)}
        key, value = make[key_kind](key_dim).float(), make[value_kind](value_dim).float()
        return cls(key, key.mT, value, value.mT)

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
        """A^-T, what queries are multiplied by; contiguous on a GPU, where kernels read it."""
        return self.key_inverse.mT if self.key_inverse.device.type == "cpu" else self.key_inverse.mT.contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, what they share counted once."""
        tensors = [*self.tensors().values(), *([self.key_query] if "key_query" in vars(self) else [])]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors present, by field name."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: tensor for name, tensor in named if tensor is not None}

    def to(self, device: torch.device) -> "LayerConstants":
        """The same constants on another device; on the CPU an inverse may stay a view of its transform."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        if torch.device(device).type != "cpu":
            moved = {name: tensor.contiguous() for name, tensor in moved.items()}
        return LayerConstants(**moved)

    def __deepcopy__(self, memo):
        # Constants never change and belong to the model, not to a sequence: copies of a cache share them.
        return self
