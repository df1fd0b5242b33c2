"""What is benched: preset shapes with random weights, models by name, their artifacts and prompts."""

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ..artifact.artifact import Artifact
from ..errors import OscarError
from ..transformers_compat import model_config as compat
from .shapes import SHAPES, check_shape


def shaped_model(shape: str, device: torch.device):
    """A model of a preset shape with random BF16 weights, built on the device, sdpa attention."""
    check_shape(shape)
    config = AutoConfig.for_model(**SHAPES[shape], eos_token_id=None, bos_token_id=None, pad_token_id=None)
    with torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def plain_generation(model) -> None:
    """Let generate() decode greedily to the number of tokens asked for, whatever the model's own settings."""
    model.generation_config = GenerationConfig()


def synthetic_artifact(config) -> Artifact:
    """What a cache takes without an artifact; what it costs does not depend on the matrices."""
    return Artifact.data_free()


def _geometry(config) -> dict[str, int]:
    geometry = compat.attention_geometry(config)
    if len(geometry) != 2:
        raise OscarError(
            f"{getattr(config, 'model_type', 'this model')} does not state one number of KV heads and one head dim for all "
            "layers: give --artifact, and leave out --synthetic-prefill"
        )
    return geometry


def prompt_row(model, context: int, tokenizer=None) -> Tensor:
    """One prompt [context] on the model's device: the package's own text, repeated as needed, or random ids without a
    tokenizer."""
    if tokenizer is None:
        vocabulary = compat.text_config(model.config).vocab_size
        ids = torch.randint(min(10, vocabulary - 1), vocabulary, (context,), generator=torch.Generator().manual_seed(0))
    else:
        from ..calibration.text import default_text

        ids = tokenizer(default_text()[0], return_tensors="pt", verbose=False)["input_ids"][0]
        ids = ids.repeat(-(-context // ids.shape[0]))[:context]
    return ids.to(next(model.parameters()).device)


def prompts(row: Tensor, batch: int) -> Tensor:
    """[batch, T]: the prompt, and after it rotated copies, so that rows differ and the first does not depend on the batch."""
    return torch.stack([row.roll(i) for i in range(batch)])


def states_shape(config) -> tuple[int, int]:
    """(KV heads, head dim) of every attention layer. Raises OscarError where they differ between layers."""
    geometry = _geometry(compat.text_config(config))
    return geometry["num_key_value_heads"], geometry["head_dim"]
