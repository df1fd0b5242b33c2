"""Tiny random models of the families that OscarCache supports, from their own config classes."""

import torch
import transformers

COMMON = dict(
    vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)

# name -> (config class, fields on top of COMMON)
FAMILIES = {
    "llama": ("LlamaConfig", dict(head_dim=16)),
    "qwen3": ("Qwen3Config", dict(head_dim=64)),
    "mistral": ("MistralConfig", dict(head_dim=16, sliding_window=None)),
    "mistral_sliding": ("MistralConfig", dict(head_dim=16, sliding_window=24)),
    "gemma2": ("Gemma2Config", dict(head_dim=32, sliding_window=24, query_pre_attn_scalar=32)),
    "gemma3": (
        "Gemma3TextConfig",
        dict(head_dim=32, sliding_window=24, layer_types=["sliding_attention", "full_attention", "full_attention"]),
    ),
    "gpt_oss": (
        "GptOssConfig",
        dict(
            head_dim=16, sliding_window=24, num_local_experts=4, num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        ),
    ),
    "qwen2_moe": ("Qwen2MoeConfig", dict(MOE, shared_expert_intermediate_size=32)),
    "phi3": ("Phi3Config", dict(hidden_size=384, num_attention_heads=4, num_key_value_heads=2)),
    "qwen3_next": (
        "Qwen3NextConfig",
        dict(
            MOE, head_dim=32, shared_expert_intermediate_size=32, num_hidden_layers=4,
            layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        ),
    ),
    # Layers 2 and 3 read the keys and values of layers 0 and 1.
    "gemma3n": (
        "Gemma3nTextConfig",
        dict(
            hidden_size=32, num_hidden_layers=4, intermediate_size=[32] * 4, head_dim=16, sliding_window=24, laurel_rank=4,
            vocab_size_per_layer_input=96, hidden_size_per_layer_input=8, num_kv_shared_layers=2, altup_num_inputs=2,
            activation_sparsity_pattern=[0.0] * 4,
            layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
}  # fmt: skip

# Logit sinks and score softcapping: transformers offers these families no sdpa attention (Gemma 2 since 5.24).
EAGER_ONLY = ("gpt_oss", "gemma2")


def tiny_config(family: str, **overrides):
    """Config of a family; overrides win."""
    name, fields = FAMILIES[family]
    return getattr(transformers, name)(**{**COMMON, **fields, **overrides})


def tiny_model(family: str, attn: str = "sdpa", seed: int = 0, **overrides):
    """Random causal language model of a family, float32, eval mode, its weights large enough that tokens matter."""
    torch.manual_seed(seed)
    config = tiny_config(family, **overrides)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                # The default 0.02 makes attention nearly uniform, which would hide wrong keys.
                parameter.normal_(0, 0.35 if "embed" in name else 1.2 / parameter.shape[-1] ** 0.5)
    return model


def prompt(batch: int, length: int, pads: tuple[int, ...] = (), seed: int = 0):
    """Random ids [batch, length] and their mask, row i left-padded by pads[i]."""
    ids = torch.randint(2, 96, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
        ids[row, :pad] = 0
    return ids, mask
