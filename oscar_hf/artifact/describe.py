"""An artifact in words, for `oscar-hf inspect`."""

import json
from collections.abc import Iterable

from ..quantization.rotation import condition_number, inverse_error
from .config import OscarConfig
from .layer_constants import LayerConstants


def describe(source: str, config: OscarConfig, layers: dict[int, LayerConstants]) -> str:
    """Several lines for people: what an artifact is, its geometry, its provenance, how sound its matrices are."""
    lines = [f"artifact    {source}"]
    lines.append(f"recipe      {config.recipe}: keys {config.key_transform}, values {config.value_transform}")
    lines.append(
        f"scales      keys {config.key_scale}{' symmetric' if config.key_symmetric else ''}, "
        f"values {config.value_scale}{' symmetric' if config.value_symmetric else ''}, "
        f"keys centered by {config.key_center}{f' of {config.center_block}' if config.center_block else ''}, "
        f"per head {'yes' if config.per_head else 'no'}"
    )
    lines.append(
        f"windows     sink {config.sink_tokens}, recent {config.recent_tokens}, group {config.group_size or 'head dim'}"
    )
    lines.append(f"base model  {config.base_model} revision {config.base_model_revision} ({config.model_type})")
    lines.append(
        f"geometry    {config.num_hidden_layers} layers, KV heads {config.num_key_value_heads}, "
        f"head dim {config.head_dim}, value head dim {config.value_head_dim or 'the same'}"
    )
    if layers:
        worst = max(inverse_error(c.key_transform, c.key_inverse) for c in layers.values())
        condition = max(condition_number(c.key_transform) for c in layers.values())
        nbytes = sum(c.nbytes for c in layers.values())
        lines.append(f"tensors     layers {layer_ranges(layers)}, {nbytes / 1e6:.1f} MB")
        lines.append(f"soundness   max |A A^-1 - I| {worst:.1e}, condition number {condition:.3g}: sound")
    else:
        lines.append("tensors     none needed")
    for key, value in sorted(config.calibration.items()):
        lines.append(f"calibration {key}: {json.dumps(value)}")
    return "\n".join(lines)


def layer_ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> '0-2, 5'."""
    numbers, parts = sorted(numbers), []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
