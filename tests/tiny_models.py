"""Tiny random models of the families that OscarCache is tested with, from their own config classes."""

import pytest
import torch
import transformers

TOKENS = dict(vocab_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=None)
# Untied: with the embedding as its head a random model only repeats its last token.
COMMON = dict(
    TOKENS, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=2048, tie_word_embeddings=False,
)  # fmt: skip
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
ONE_SLIDING = dict(sliding_window=24, layer_types=["sliding_attention", "full_attention", "full_attention"])
PARTIAL_ROPE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
GATED_DELTA = dict(
    num_hidden_layers=4,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_expand=1, mamba_chunk_size=16)

# name -> (config class, fields on top of COMMON)
FAMILIES = {
    "llama": ("LlamaConfig", dict(head_dim=16)),
    "qwen2": ("Qwen2Config", dict()),
    "qwen3": ("Qwen3Config", dict(head_dim=64)),
    "mistral": ("MistralConfig", dict(head_dim=16, sliding_window=None)),
    "mistral_sliding": ("MistralConfig", dict(head_dim=16, sliding_window=24)),
    "phi3": ("Phi3Config", dict(hidden_size=384, num_attention_heads=4, num_key_value_heads=2)),
    "phi4": ("Phi3Config", dict(hidden_size=256, num_attention_heads=2, num_key_value_heads=1, rope_parameters=PARTIAL_ROPE)),
    "granite": ("GraniteConfig", dict(attention_multiplier=0.1, embedding_multiplier=3.0, logits_scaling=2.0)),
    "starcoder2": ("Starcoder2Config", dict()),
    "smollm3": ("SmolLM3Config", dict(no_rope_layer_interval=2)),
    "olmo2": ("Olmo2Config", dict()),
    "glm4": ("Glm4Config", dict(head_dim=16, rope_parameters=PARTIAL_ROPE)),
    "cohere2": ("Cohere2Config", dict(ONE_SLIDING)),
    "exaone4": ("Exaone4Config", dict(ONE_SLIDING)),
    "gemma2": ("Gemma2Config", dict(head_dim=32, sliding_window=24, query_pre_attn_scalar=32)),
    "gemma3": ("Gemma3TextConfig", dict(ONE_SLIDING, head_dim=32)),
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
    # The full-attention layers have one KV head of 32, the sliding ones two of 16; layers 3 and 4 read layers 1 and 2.
    "gemma4": (
        "Gemma4TextConfig",
        dict(
            num_hidden_layers=5, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
            sliding_window=24, vocab_size_per_layer_input=96, hidden_size_per_layer_input=8, num_kv_shared_layers=2,
            layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        ),
    ),
    "gpt_oss": ("GptOssConfig", dict(ONE_SLIDING, head_dim=16, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2_moe": ("Qwen2MoeConfig", dict(MOE, shared_expert_intermediate_size=32)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(MOE, head_dim=16)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2)),
    # Twelve query heads share one KV head.
    "glm4_moe": (
        "Glm4MoeConfig",
        dict(
            num_attention_heads=12, num_key_value_heads=1, head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=32, rope_parameters=PARTIAL_ROPE,
        ),
    ),
    "llama4": (
        "Llama4TextConfig",
        dict(
            head_dim=16, attention_chunk_size=24, num_local_experts=4, intermediate_size_mlp=64, num_hidden_layers=4,
            no_rope_layer_interval=2,
        ),
    ),
    "qwen3_next": ("Qwen3NextConfig", dict(MOE, **GATED_DELTA, head_dim=32, shared_expert_intermediate_size=32)),
    "qwen3_5": ("Qwen3_5TextConfig", dict(GATED_DELTA, head_dim=32)),
    "lfm2": ("Lfm2Config", dict(layer_types=["conv", "full_attention", "conv", "full_attention"], num_hidden_layers=4)),
    "falcon_h1": ("FalconH1Config", dict(MAMBA, mamba_d_ssm=64, head_dim=16)),
    "bamba": ("BambaConfig", dict(MAMBA, attn_layer_indices=[1, 2])),
}  # fmt: skip

# A model that reads images: an image is four tokens IMAGE; fields of its text model come on top of COMMON.
IMAGE = 90
VISION = {
    "gemma3_vision": (
        "Gemma3Config",
        dict(ONE_SLIDING, head_dim=16, query_pre_attn_scalar=16),
        dict(
            vision_config=dict(
                hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=7,
            ),
            mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=91, eoi_token_index=92,
        ),
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        dict(
            head_dim=16,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2], mrope_interleaved=True),
        ),
        dict(
            vision_config=dict(
                depth=1, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=4, spatial_merge_size=2,
                temporal_patch_size=1, out_hidden_size=64, num_position_embeddings=16, deepstack_visual_indexes=[0],
            ),
            image_token_id=IMAGE, video_token_id=93, vision_start_token_id=91, vision_end_token_id=92,
        ),
    ),
}  # fmt: skip

ENCODER_DECODER = {
    "t5": ("T5Config", dict(d_model=64, d_kv=16, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=1)),
    "bart": (
        "BartConfig",
        dict(
            d_model=64, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=64, decoder_ffn_dim=64, forced_eos_token_id=None, decoder_start_token_id=1,
        ),
    ),
}  # fmt: skip

# Logit sinks and score softcapping: transformers offers these families no sdpa attention (Gemma 2 since 5.24).
EAGER_ONLY = ("gpt_oss", "gemma2")


def tiny_config(family: str, **overrides):
    """Config of a family; overrides win. Skips the test where transformers does not know the family."""
    name, fields, *outer = {**FAMILIES, **VISION, **ENCODER_DECODER}[family]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config_class = getattr(transformers, name)
    fields = {**(TOKENS if family in ENCODER_DECODER else COMMON), **fields, **overrides}
    return config_class(text_config=fields, **outer[0]) if outer else config_class(**fields)


def tiny_model(family: str, attn: str = "sdpa", seed: int = 0, **overrides):
    """Random model of a family, float32, eval mode, its weights large enough that tokens matter."""
    torch.manual_seed(seed)
    config = tiny_config(family, **overrides)
    kind = "ImageTextToText" if family in VISION else "Seq2SeqLM" if family in ENCODER_DECODER else "CausalLM"
    auto = getattr(transformers, f"AutoModelFor{kind}")
    model = auto.from_config(config, attn_implementation=attn, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                # The default 0.02 makes attention nearly uniform, which would hide wrong keys.
                embedding = "embed" in name or "shared" in name
                parameter.normal_(0, 0.35 if embedding else 1.2 / parameter.shape[-1] ** 0.5)
    return model


def prompt(batch: int, length: int, pads: tuple[int, ...] = (), seed: int = 0):
    """Random ids [batch, length] and their mask, row i left-padded by pads[i]."""
    ids = torch.randint(2, 96, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
        ids[row, :pad] = 0
    return ids, mask


def inputs(family: str, batch: int, length: int, pads: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Arguments of generate() for a family: a prompt, for VISION with an image in every row, after 20 tokens."""
    ids, mask = prompt(batch, length, pads)
    if family not in VISION:
        return dict(input_ids=ids, attention_mask=mask)
    ids = ids.clamp(max=IMAGE - 1)
    ids[:, 19], ids[:, 20:24] = 91, IMAGE
    kinds, noise = (ids == IMAGE).long(), torch.Generator().manual_seed(0)
    if family == "qwen3_vl":
        image = dict(
            pixel_values=torch.randn(16 * batch, 48, generator=noise), mm_token_type_ids=kinds,
            image_grid_thw=torch.tensor([[1, 4, 4]] * batch),
        )  # fmt: skip
    else:
        image = dict(pixel_values=torch.randn(batch, 3, 28, 28, generator=noise), token_type_ids=kinds)
    return dict(input_ids=ids, attention_mask=mask, **image)
