"""The fused decode kernel on a layer's own buffers: the same as plain PyTorch, in the interpreter and through handles on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from helpers import calibrated_artifact
from tiny_models import tiny_config

from oscar_hf import Artifact, OscarCache
from oscar_hf.attention import dispatch
from oscar_hf.attention.packed import packed_attention
from oscar_hf.kernels.decode import decode_attention
from oscar_hf.kernels.launch import HAS_TRITON, interpreting

WINDOWS = dict(sink_tokens=8, recent_tokens=16)
DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(not (HAS_TRITON and interpreting()), reason="needs Triton and TRITON_INTERPRET=1"),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def layer_with(artifact, dim, device, length=90, new=1, batch=2, starts=None, dtype=torch.float32):
    """A layer of 2 KV heads after a prompt, some single tokens and a call of `new` tokens; the handles of that call."""
    torch.manual_seed(0)
    cache = OscarCache(tiny_config("llama", head_dim=dim), artifact=artifact, **WINDOWS)
    layer = cache.layers[0]
    if starts:
        layer.set_padding(starts)

    def states(count):
        return (torch.randn(batch, 2, count, dim, device=device, dtype=dtype) for _ in range(2))

    layer.update(*states(length))
    for _ in range(3):
        layer.update(*states(1))
    return layer, layer.update(*states(new))


def artifact_of(kind, dim):
    return Artifact.data_free() if kind == "hadamard" else calibrated_artifact(layers=3, heads=2, dim=dim)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["hadamard", "calibrated"])
@pytest.mark.parametrize("new, mask", [(1, None), (3, None), (1, "padded"), (3, "padded")])
def test_kernel_equals_plain_pytorch(device, dim, kind, new, mask):
    starts = [0, 21] if mask else None
    layer, _ = layer_with(artifact_of(kind, dim), dim, device, new=new, starts=starts)
    query = torch.randn(2, 6, new, dim, device=device)
    if mask:
        total = layer.get_seq_length()
        mask = torch.ones(2, 1, new, total, dtype=torch.bool, device=device).tril(total - new)
        mask[1, :, :, :21] = False
    expected = packed_attention(layer.store, query, mask, new > 1 and mask is None, 0.2)
    got = decode_attention(query, layer.store.decode_store(), mask=mask, scale=0.2)
    assert torch.linalg.vector_norm(got - expected) < 2e-3 * torch.linalg.vector_norm(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["gqa", "packed query", "mask", "draft"])
def test_handles_reach_the_kernel(way, monkeypatch):
    calls = []

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return decode_attention(*args, **kwargs)

    monkeypatch.setattr(dispatch, "decode_attention", spy)
    new = 3 if way == "draft" else 1
    layer, (keys, values) = layer_with(Artifact.data_free(), 128, "cuda", new=new, dtype=torch.bfloat16)
    query = torch.randn(2, 6, new, 128, device="cuda", dtype=torch.bfloat16)
    total = layer.get_seq_length()
    mask = None
    if way in ("mask", "draft"):
        mask = torch.ones(2, 1, new, total, dtype=torch.bool, device="cuda").tril(total - new)
        mask[1, :, :, :9] = False
    dense = layer.store.dense("k").repeat_interleave(3, 1), layer.store.dense("v").repeat_interleave(3, 1)
    expected = F.scaled_dot_product_attention(query.float(), *(x.float() for x in dense), attn_mask=mask)
    if way == "packed query":
        got = F.scaled_dot_product_attention(query.view(2, 2, 3, 128), keys, values).view(2, 6, 1, 128)
    else:
        got = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    assert len(calls) == 1 and got.dtype == torch.bfloat16
    assert torch.linalg.vector_norm(got.float() - expected) < 2e-2 * torch.linalg.vector_norm(expected)
