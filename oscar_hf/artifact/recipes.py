"""The named recipes, and the names that the parts of an artifact go by. Imports nothing heavy: the command line reads it."""

from typing import Any

TRANSFORMS = ("whitened", "hadamard", "identity", "oscar", "balanced")
# An orthogonal transform serves values; "whitened" and "balanced" weigh keys.
VALUE_TRANSFORMS = ("hadamard", "identity", "oscar")
# Transforms that need nothing prepared: they follow from the head dim, or are made by each cache from its own first tokens.
DATA_FREE_TRANSFORMS = ("whitened", "hadamard", "identity")
KEY_CENTERS = ("block", "mean", "none")
VALUE_TARGETS = ("score", "attention")

# How rows are stored, whatever they are rotated by.
_STORAGE = dict(
    key_center="block", key_scale="feedback", value_scale="unbiased", key_symmetric=True, value_symmetric=True,
)  # fmt: skip

RECIPES: dict[str, dict[str, Any]] = {
    # Nothing prepared: each cache whitens keys by the statistics of its own first tokens.
    "default": dict(key_transform="whitened", value_transform="hadamard", per_head=True, **_STORAGE),
    # A fixed rotation; only what an error costs is taken from the first tokens.
    "hadamard": dict(key_transform="hadamard", value_transform="hadamard", per_head=False, **_STORAGE),
    # Calibrated: weighs what sets the step against what an error costs.
    "balanced": dict(key_transform="balanced", value_transform="oscar", per_head=True, **_STORAGE),
    # The published rotations, arXiv 2605.17757, in this storage; PUBLISHED_STORAGE is the published one.
    "paper": dict(key_transform="oscar", value_transform="oscar", per_head=False, **_STORAGE),
}

# The storage of the published method, for comparisons.
PUBLISHED_STORAGE = dict(
    key_center="none", key_scale="percentile(0.96)", value_scale="percentile(0.92)", key_symmetric=False,
    value_symmetric=False,
)  # fmt: skip

# Fields that only change how rows are stored, so that a user may override them on a finished artifact.
OVERRIDABLE = (
    "sink_tokens", "recent_tokens", "group_size", "key_scale", "value_scale", "key_symmetric", "value_symmetric",
    "key_center", "key_block",
)  # fmt: skip
