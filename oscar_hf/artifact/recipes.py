"""The named recipes, and the names that the parts of an artifact go by. Imports nothing heavy: the command line reads it."""

from typing import Any

TRANSFORMS = ("oscar", "hadamard", "identity", "balanced")
# An orthogonal transform serves values; "balanced" weighs keys against queries.
VALUE_TRANSFORMS = tuple(name for name in TRANSFORMS if name != "balanced")
# Transforms that follow from the head dim alone.
DATA_FREE_TRANSFORMS = ("hadamard", "identity")
VALUE_TARGETS = ("score", "attention")

RECIPES: dict[str, dict[str, Any]] = {
    # The published method, arXiv 2605.17757.
    "paper": dict(
        key_transform="oscar", value_transform="oscar", center_keys=False, per_head=False,
        key_scale="percentile(0.96)", value_scale="percentile(0.92)",
    ),
    # No calibration data at all: a Hadamard rotation and the paper's clipping.
    "hadamard": dict(
        key_transform="hadamard", value_transform="hadamard", center_keys=False, per_head=False,
        key_scale="percentile(0.96)", value_scale="percentile(0.92)",
    ),
    # Beyond the paper at the same bits: the parts that lost least on the models measured.
    "default": dict(
        key_transform="balanced", value_transform="oscar", center_keys=True, per_head=True,
        key_scale="weighted_search_both_ends", value_scale="percentile(0.92)",
    ),
}  # fmt: skip

# Fields that only change how rows are stored, so that a user may override them on a finished artifact.
OVERRIDABLE = (
    "sink_tokens", "recent_tokens", "group_size", "key_scale", "value_scale", "key_symmetric", "value_symmetric",
)  # fmt: skip
