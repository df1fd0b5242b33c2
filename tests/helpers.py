"""Builders shared by the tests of transforms, artifacts and the Hub: random matrices, artifacts, RotationZoo files."""

import torch

from oscar_hf import Artifact, OscarConfig
from oscar_hf.artifact.layer_constants import LayerConstants
from oscar_hf.quantization.kv_side import Side, SideFormat
from oscar_hf.quantization.quantizer import ScaleRule

ZOO_V1 = ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt")
ZOO_V2 = ("k_rotation_perhead.pt", "v_rotation_perhead.pt")


def generator(seed=0):
    """A seeded torch.Generator."""
    return torch.Generator().manual_seed(seed)


def random_orthogonal(*shape, seed=0):
    """Random orthogonal float64 matrices [..., D, D]."""
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64, generator=generator(seed)))[0]


def pairwise_mix(dim, seed=0):
    """A float32 [D, D] whose columns mix two channels each, exactly: in whatever order it is summed, the product is the same."""
    mix = torch.kron(torch.eye(dim // 2), torch.tensor([[0.5, 0.5], [0.5, -0.5]]))
    return mix[torch.randperm(dim, generator=generator(seed))].contiguous()


def random_covariance(*shape, seed=0, decay=0.8):
    """Random float64 covariances [..., D, D] with a geometric spectrum, largest eigenvalue 1."""
    rotation = random_orthogonal(*shape, seed=seed)
    spectrum = decay ** torch.arange(shape[-1], dtype=torch.float64)
    return rotation * spectrum @ rotation.mT


def calibrated_artifact(layers=3, heads=2, dim=16, value_dim=None, seed=0, without=(), **fields):
    """An artifact of recipe `balanced` with all kinds of tensors, or `without` some: balanced keys, means, metrics, orthogonal
    values."""
    value_dim = value_dim or dim
    made = {}
    for layer in range(layers):
        key = random_orthogonal(heads, dim, dim, seed=seed + 10 * layer)
        key = key * torch.linspace(0.5, 2, dim, dtype=torch.float64)
        value = random_orthogonal(heads, value_dim, value_dim, seed=seed + 10 * layer + 1)
        tensors = dict(
            key_transform=key,
            key_inverse=torch.linalg.inv(key),
            value_transform=value,
            value_inverse=value.mT,
            key_mean=torch.randn(heads, dim, dtype=torch.float64, generator=generator(seed + 10 * layer + 2)),
            key_metric=random_covariance(heads, dim, dim, seed=seed + 10 * layer + 3),
        )
        made[layer] = LayerConstants(
            **{name: tensor.float().contiguous() for name, tensor in tensors.items() if name not in without}
        )
    fields = dict(
        num_hidden_layers=layers, num_key_value_heads=heads, head_dim=dim, value_head_dim=value_dim, model_type="llama"
    ) | fields  # fmt: skip
    return Artifact(OscarConfig.from_recipe("balanced", **fields), made)


def side_of(rows, rule=None, transform=None, mean=None, metric=None, inverse=None, sink=None, ring=None):
    """A Side over a PackedRows; rule: a ScaleRule, its name, or None for the plain range."""
    rule = ScaleRule.parse(rule) if isinstance(rule, str) else rule or ScaleRule()
    is_identity = transform is None and inverse is None
    form = SideFormat(rows.head_dim, rows.group_size, rows.symmetric, rule, is_identity, rows.center_block)
    return Side(form, rows, transform, inverse, mean, metric, sink, ring)


def zoo_state(layers, *shape, version=1, seed=0):
    """Content of one RotationZoo file with random orthogonal rotations of a shape: [D, D] (v1) or [Hkv, D, D] (v2)."""
    return {
        "format_version": version,
        "objective": "test",
        "source_grouping": "layer" if len(shape) == 2 else "head",
        "layers": {
            layer: {
                "layer_id": layer,
                "rotation": random_orthogonal(*shape, seed=seed + layer).float(),
                "eigenvalues": torch.ones(shape[:-1]),
            }
            for layer in layers
        },
    }


def write_zoo(folder, keys, values, names=ZOO_V1):
    """Write a RotationZoo folder; None leaves a file out. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, state in zip(names, (keys, values)):
        if state is not None:
            torch.save(state, folder / name)
    return folder
