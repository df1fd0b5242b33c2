"""OscarKV: the lazy views, the packed paths, and the dense fallback for everything else."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_config

from oscar_hf import OscarCache
from oscar_hf.attention import kv_handle as handle
from oscar_hf.attention.kv_handle import OscarKV


@pytest.fixture
def pair():
    """Handles over 61 tokens (4 sink, 49 history, 8 recent) and the dense tensors they stand for."""
    layer = OscarCache(tiny_config("llama"), recipe="hadamard", sink_tokens=4, recent_tokens=8).layers[0]
    layer.update(torch.randn(2, 2, 60, 16), torch.randn(2, 2, 60, 16))
    keys, values = layer.update(torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16))
    handle._warned.clear()
    return keys, values, layer.store.dense("k"), layer.store.dense("v")


def repeat_kv(x, n):
    batch, heads, tokens, dim = x.shape
    return x[:, :, None, :, :].expand(batch, heads, n, tokens, dim).reshape(batch, heads * n, tokens, dim)


def test_looks_like_a_tensor(pair):
    keys, _, dense, _ = pair
    assert keys.shape == dense.shape and keys.dtype == dense.dtype and keys.device == dense.device
    assert (keys.dim(), keys.ndim, keys.size(), keys.size(2), keys.numel(), len(keys)) == (
        4, 4, dense.size(), 61, dense.numel(), 2,
    )  # fmt: skip
    assert keys.contiguous() is keys and keys.detach() is keys and not keys.requires_grad
    assert "OscarKV" in repr(keys)


@pytest.mark.parametrize("way", ["enable_gqa", "repeat_kv", "repeat_interleave", "packed query"])
@pytest.mark.parametrize("mask", [None, "bool", "additive"])
def test_sdpa_takes_the_packed_path(pair, way, mask):
    keys, values, dense_keys, dense_values = pair
    query = torch.randn(2, 4, 1, 16)
    if mask == "bool":
        mask = torch.rand(2, 1, 1, 61) > 0.3
    elif mask == "additive":
        mask = torch.randn(2, 4 if way != "packed query" else 1, 1, 61)
    expected = F.scaled_dot_product_attention(
        query, dense_keys, dense_values, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if way == "enable_gqa":
            got = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.3, enable_gqa=True)
        elif way == "repeat_kv":
            got = F.scaled_dot_product_attention(
                query, repeat_kv(keys, 2), repeat_kv(values, 2), attn_mask=mask, scale=0.3
            )
        elif way == "repeat_interleave":
            repeated = torch.repeat_interleave(keys, 2, dim=1), values.repeat_interleave(2, dim=1)
            got = F.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.3)
        else:
            folded = query.view(2, 2, 2, 16)
            got = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=0.3).view(2, 4, 1, 16)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_eager_attention_takes_the_packed_path(pair):
    keys, values, dense_keys, dense_values = pair
    query = torch.randn(2, 4, 3, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = torch.matmul(query, repeat_kv(keys, 2).transpose(2, 3))
        also = query @ repeat_kv(keys, 2).transpose(-1, -2)
        output = torch.matmul(scores.softmax(-1), repeat_kv(values, 2))
    expected = query @ repeat_kv(dense_keys, 2).mT
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(also, scores)
    torch.testing.assert_close(output, expected.softmax(-1) @ repeat_kv(dense_values, 2), atol=1e-5, rtol=1e-4)


OPERATIONS = {
    "cat": lambda k: torch.cat([k, k], 2),
    "stack": lambda k: torch.stack([k, k]),
    "einsum": lambda k: torch.einsum("bhtd,bhsd->bhts", k, k),
    "pad": lambda k: F.pad(k, (0, 1)),
    "slice": lambda k: k[:, :, -5:],
    "index": lambda k: k[0],
    "permute": lambda k: k.permute(0, 2, 1, 3),
    "transpose 1 2": lambda k: k.transpose(1, 2),
    "reshape": lambda k: k.reshape(2, -1),
    "chunk": lambda k: torch.chunk(k, 2, dim=1)[1],
    "to": lambda k: k.to(torch.float64),
    "float": lambda k: k.float(),
    "sum": lambda k: k.sum(-1),
    "linear": lambda k: F.linear(k, torch.eye(16)),
    "add": lambda k: k + 1,
    "radd": lambda k: 1 + k,
    "mul": lambda k: k * 2,
    "neg": lambda k: -k,
    "compare": lambda k: k > 0,
    "repeated": lambda k: repeat_kv(k, 2) * 1,
    "transposed": lambda k: k.transpose(2, 3) + 0,
    "unrepeated form": lambda k: k[:, :, None, :, :] * 1,
    "key matmul": lambda k: torch.matmul(k, torch.ones(16, 3)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_any_other_operation_gets_the_dense_tensor_with_a_warning(pair, name):
    keys, _, dense, _ = pair
    with pytest.warns(UserWarning, match="dequantized on every step"):
        got = OPERATIONS[name](keys)
    assert not isinstance(got, OscarKV)
    assert torch.equal(got, OPERATIONS[name](dense))


def test_the_warning_names_the_operation_and_comes_once(pair):
    keys = pair[0]
    with pytest.warns(UserWarning, match="`cumsum`"):
        keys.cumsum(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keys.cumsum(-1)


def test_probing_for_attributes_does_not_dequantize(pair):
    keys = pair[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not hasattr(keys, "__cuda_array_interface__") and not hasattr(keys, "_typed_storage")


def test_dropout_and_foreign_pairs_go_dense(pair):
    keys, values, dense_keys, dense_values = pair
    query = torch.randn(2, 2, 1, 16)
    expected = F.scaled_dot_product_attention(query, dense_values, dense_values)
    with pytest.warns(UserWarning, match="scaled_dot_product_attention"):
        got = F.scaled_dot_product_attention(query, values, values)
    torch.testing.assert_close(got, expected)
    got = F.scaled_dot_product_attention(query, keys, values, dropout_p=0.5)
    assert got.shape == query.shape
    torch.testing.assert_close(
        F.scaled_dot_product_attention(query, keys, dense_values),
        F.scaled_dot_product_attention(query, dense_keys, dense_values),
    )


def test_moving_to_where_it_is_keeps_the_handle(pair):
    keys = pair[0]
    assert keys.to("cpu") is keys and keys.to(keys.device) is keys and keys.to(torch.float32) is keys
    assert keys.to(device="cpu", dtype=torch.float32) is keys
    with pytest.warns(UserWarning, match="`to`"):
        assert keys.to("cpu", torch.float64).dtype == torch.float64
