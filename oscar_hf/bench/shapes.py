"""Shapes of published models, for benches with random weights: speed does not depend on their values."""

from ..errors import OscarError

SHAPES = {
    "qwen3-8b": dict(
        model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=262144,
    ),
    "qwen3-0.6b": dict(
        model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=262144,
    ),
}  # fmt: skip


def check_shape(name: str) -> None:
    """Raise OscarError for a name that is not a preset."""
    if name not in SHAPES:
        raise OscarError(f"unknown shape {name!r}: use one of {', '.join(SHAPES)}")
