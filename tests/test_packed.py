"""The packed layout, word by word, and the growing store."""

import pytest
import torch
from helpers import generator
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_hf.quantization.packed_rows import PackedRows, pack_token_bytes, tokens_per_row, unpack_token_bytes

DIMS = [8, 16, 64, 80, 96, 128, 192, 256]


def random_rows(batch, heads, tokens, dim, groups=2, seed=0):
    draw = generator(seed)
    codes = torch.randint(0, 4, (batch, heads, tokens, dim), dtype=torch.uint8, generator=draw)
    scale = torch.rand(batch, heads, tokens, groups, generator=draw).half()
    return codes, scale, -scale


def store(dim, capacity=0, symmetric=False, batch=2, heads=3):
    rows = PackedRows(batch, heads, dim, dim // 2, symmetric, torch.device("cpu"))
    rows.reserve(capacity)
    return rows


def word(codes):
    """int16 value of 8 crumbs, crumb i in bits 2i and 2i+1."""
    value = sum(int(code) << 2 * i for i, code in enumerate(codes))
    return value - (1 << 16) if value >= 1 << 15 else value


@pytest.mark.parametrize("dim", [d for d in DIMS if d != 64])
def test_word_w_holds_every_eighth_part(dim):
    rows, (codes, scale, minimum) = store(dim, 4), random_rows(2, 3, 4, dim)
    rows.write(0, codes, scale, minimum)
    assert tokens_per_row(dim) == 1 and rows.codes.shape == (2, 3, rows.capacity, dim // 8)
    for token in range(4):
        row = codes[1, 2, token].tolist()
        expected = [word(row[w + i * dim // 8] for i in range(8)) for w in range(dim // 8)]
        assert rows.codes[1, 2, token].tolist() == expected


def test_head_dim_64_holds_two_tokens_in_a_row_of_16_words():
    rows, (codes, scale, minimum) = store(64, 6), random_rows(2, 3, 6, 64)
    rows.write(0, codes, scale, minimum)
    assert tokens_per_row(64) == 2 and rows.codes.shape == (2, 3, rows.capacity // 2, 16)
    for pair in range(3):
        even, odd = codes[1, 2, 2 * pair].tolist(), codes[1, 2, 2 * pair + 1].tolist()
        expected = [word([t[16 * i + w] for t in (even, odd) for i in range(4)]) for w in range(16)]
        assert rows.codes[1, 2, pair].tolist() == expected


@settings(max_examples=60, deadline=None)
@given(dim=st.sampled_from(DIMS), tokens=st.integers(0, 7), start=st.integers(0, 9), symmetric=st.booleans())
def test_round_trip_anywhere_leaves_the_neighbors_alone(dim, tokens, start, symmetric):
    rows, before = store(dim, 18, symmetric), random_rows(2, 3, 18, dim, seed=1)
    rows.write(0, before[0], before[1], None if symmetric else before[2])
    after = random_rows(2, 3, tokens, dim, seed=2)
    assert torch.equal(unpack_token_bytes(pack_token_bytes(after[0]), dim), after[0])
    rows.write(start, after[0], after[1], None if symmetric else after[2])
    for part, old, new in zip(rows.read(0, 18), before, after):
        if part is None:
            assert symmetric
            continue
        expected = old.clone()
        expected[:, :, start : start + tokens] = new
        assert torch.equal(part, expected)
    stop = start + tokens
    assert torch.equal(rows.read(start, stop)[0], after[0]), "a read may begin and end anywhere, too"


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_growing_keeps_content_and_zeroes_the_rest(dim, symmetric):
    rows, (codes, scale, minimum) = store(dim, 5, symmetric), random_rows(2, 3, 5, dim)
    rows.write(0, codes, scale, None if symmetric else minimum)
    small = rows.capacity
    rows.reserve(small)
    assert rows.capacity == small, "nothing to do"
    rows.reserve(small + 1)
    assert rows.capacity > small and rows.capacity % 2 == 0
    held = rows.read(0, 5)
    assert torch.equal(held[0], codes) and torch.equal(held[1], scale)
    assert held[2] is None if symmetric else torch.equal(held[2], minimum)
    rest = rows.read(5, rows.capacity)
    assert not any(part.any() for part in rest if part is not None)


def test_one_token_at_a_time_grows_rarely():
    rows, growths, capacity = store(16), 0, 0
    for tokens in range(1, 2000):
        rows.reserve(tokens)
        assert rows.capacity >= tokens
        growths, capacity = growths + (rows.capacity != capacity), rows.capacity
    assert growths < 20 and rows.capacity < 2000 * 1.4


def test_bytes_are_those_of_two_bits_and_the_qparams():
    rows = store(128, 64)
    elements = 2 * 3 * rows.capacity * 128
    assert rows.code_bytes == elements // 4
    assert rows.qparam_bytes == elements // 64 * 2 * 2
    assert store(128, 64, symmetric=True).qparam_bytes == rows.qparam_bytes // 2


def test_map_reaches_every_tensor():
    rows, (codes, scale, minimum) = store(64, 3), random_rows(2, 3, 3, 64)
    rows.write(0, codes, scale, minimum)
    rows = rows.mapped(lambda t: t.flip(0))
    for part, given_part in zip(rows.read(0, 3), (codes, scale, minimum)):
        assert torch.equal(part, given_part.flip(0))
    symmetric = store(64, 3, symmetric=True)
    symmetric = symmetric.mapped(lambda t: t.flip(0))
    assert symmetric.min is None and list(symmetric.named) == ["codes", "scale"]
