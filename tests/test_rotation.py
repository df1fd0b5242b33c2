"""The mathematics of the transforms: Hadamard, bit reversal, spectral rotation, balanced transform."""

import pytest
import torch
from helpers import generator, random_covariance, random_orthogonal

from oscar_hf.quantization.quantizer import ScaleRule, dequantize, quantize_rows
from oscar_hf.quantization.rotation import (
    balanced_transform,
    bit_reversal,
    bit_reversal_columns,
    condition_number,
    hadamard,
    inverse_error,
    power_of_two_blocks,
    regularize,
    spectral_rotation,
    symmetrize,
)

BLOCKS = {16: [16], 64: [64], 80: [64, 16], 96: [64, 32], 128: [128], 192: [128, 64], 256: [256], 1: [1]}


@pytest.mark.parametrize("dim,blocks", BLOCKS.items())
def test_hadamard_is_orthogonal_over_the_largest_power_of_two_blocks(dim, blocks):
    assert power_of_two_blocks(dim) == blocks
    matrix = hadamard(dim)
    assert matrix.dtype == torch.float64 and inverse_error(matrix, matrix.mT) < 1e-12
    start = 0
    for size in blocks:
        stop = start + size
        assert torch.allclose(matrix[start:stop, start:stop].abs(), torch.full((), size**-0.5, dtype=torch.float64))
        assert not matrix[start:stop, stop:].any() and not matrix[stop:, start:stop].any()
        start = stop


def test_hadamard_has_the_sylvester_order():
    expected = [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    assert (hadamard(4) * 2).tolist() == expected


def test_bit_reversal_order():
    assert bit_reversal(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert bit_reversal(1) == [0]
    assert bit_reversal_columns(8) == [7, 3, 5, 1, 6, 2, 4, 0]
    # The same rule inside each block where D is not a power of two.
    assert bit_reversal_columns(12) == [7, 3, 5, 1, 6, 2, 4, 0, 11, 9, 10, 8]
    for dim in BLOCKS:
        assert sorted(bit_reversal_columns(dim)) == list(range(dim))


@pytest.mark.parametrize("call,value", [(bit_reversal, 12), (bit_reversal, 0), (power_of_two_blocks, 0)])
def test_impossible_sizes_are_refused_by_value(call, value):
    with pytest.raises(ValueError, match=f"got {value}"):
        call(value)


def test_columns_of_the_rotation_are_those_of_u_h_in_bit_reversed_order():
    dim = 16
    covariance = random_covariance(dim, dim)
    _, eigenvectors = torch.linalg.eigh(symmetrize(covariance))
    mixed, rotation = eigenvectors @ hadamard(dim), spectral_rotation(covariance)
    for column in range(dim):
        source = dim - 1 - int(format(column, "04b")[::-1], 2)
        assert torch.equal(rotation[:, column], mixed[:, source])


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_rotated_covariance_has_a_constant_diagonal(dim):
    covariance = random_covariance(2, dim, dim, decay=0.9)
    rotation = spectral_rotation(covariance.float())
    assert rotation.dtype == torch.float64 and inverse_error(rotation, rotation.mT) < 1e-10
    diagonal = (rotation.mT @ covariance @ rotation).diagonal(dim1=-2, dim2=-1)
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    assert torch.allclose(diagonal, trace / dim, rtol=1e-4)


@pytest.mark.parametrize("dim", [80, 96, 192])
def test_each_block_of_a_split_rotation_sees_the_whole_spectrum(dim):
    covariance = random_covariance(dim, dim, decay=0.95)
    rotation = spectral_rotation(covariance)
    assert inverse_error(rotation, rotation.mT) < 1e-10
    diagonal = (rotation.mT @ covariance @ rotation).diagonal()
    mean, start = diagonal.mean(), 0
    for size in power_of_two_blocks(dim):
        block = diagonal[start : start + size]
        assert torch.allclose(block, block.mean().expand(size)), "constant inside a block"
        assert 0.6 < block.mean() / mean < 1.7, "and about the same in all of them"
        start += size


def test_bit_reversal_cannot_change_the_error_when_the_group_is_the_row():
    dim = 64
    x = torch.randn(1, 1, 20, dim, dtype=torch.float64, generator=generator())
    rotation = spectral_rotation(random_covariance(dim, dim))
    plain = rotation[:, torch.tensor(bit_reversal_columns(dim)).argsort()]
    errors = {}
    for group_size in (dim, 16):
        for name, matrix in (("p_br", rotation), ("plain", plain)):
            codes, scale, minimum = quantize_rows(x @ matrix, group_size, ScaleRule.parse("percentile(0.96)"))
            restored = dequantize(codes, scale.double(), minimum.double()) @ matrix.mT
            errors[group_size, name] = (restored - x).square().sum(-1)
    assert torch.allclose(errors[dim, "p_br"], errors[dim, "plain"], rtol=1e-9)
    assert not torch.allclose(errors[16, "p_br"], errors[16, "plain"], rtol=1e-3), "with smaller groups it does"


def balanced_problem(dim, seed=0):
    return random_covariance(2, dim, dim, seed=seed), random_covariance(2, dim, dim, seed=seed + 1, decay=0.9) * 7


def cost(transform, inverse, covariance, query_covariance):
    step = (transform.mT @ covariance @ transform).diagonal(dim1=-2, dim2=-1).sum(-1)
    return step * (inverse @ query_covariance @ inverse.mT).diagonal(dim1=-2, dim2=-1).sum(-1)


def test_balanced_transform_inverts_and_equalises():
    covariance, query_covariance = balanced_problem(32)
    transform, inverse = balanced_transform(covariance, query_covariance)
    assert transform.dtype == torch.float64
    assert inverse_error(transform, inverse) < 1e-9 and inverse_error(inverse, transform) < 1e-9
    diagonal = (transform.mT @ regularize(covariance) @ transform).diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(diagonal, diagonal.mean(-1, keepdim=True).expand_as(diagonal), rtol=1e-6)


def test_balanced_transform_minimises_the_product_of_step_and_cost():
    dim = 16
    covariance, query_covariance = balanced_problem(dim)
    transform, inverse = balanced_transform(covariance, query_covariance)
    pair = regularize(covariance), regularize(query_covariance)
    least = cost(transform, inverse, *pair)
    # The minimum in closed form: the squared nuclear norm of C^1/2 C_Q^1/2.
    nuclear = torch.linalg.svdvals(torch.linalg.cholesky(pair[0]).mT @ torch.linalg.cholesky(pair[1])).sum(-1)
    assert torch.allclose(least, nuclear.square(), rtol=1e-6)
    for seed in range(8):
        noise = torch.randn(dim, dim, dtype=torch.float64, generator=generator(seed))
        other = transform @ (torch.eye(dim, dtype=torch.float64) + 0.02 * noise)
        assert (cost(other, torch.linalg.inv(other), *pair) >= least * (1 - 1e-9)).all()
    orthogonal = random_orthogonal(dim, dim)
    assert (cost(orthogonal, orthogonal.mT, *pair) > 1.05 * least).all()


@pytest.mark.parametrize("which", ["keys", "queries", "both"])
def test_balanced_transform_survives_statistics_of_rank_zero_and_one(which):
    dim = 16
    flat = torch.zeros(dim, dim, dtype=torch.float64)
    vector = torch.randn(dim, 1, dtype=torch.float64, generator=generator())
    keys = flat if which in ("keys", "both") else vector @ vector.mT
    queries = flat if which in ("queries", "both") else vector @ vector.mT
    transform, inverse = balanced_transform(keys, queries)
    assert torch.isfinite(transform).all() and inverse_error(transform, inverse) < 1e-6
    assert inverse_error(transform.float(), inverse.float()) < 5e-3 and condition_number(transform) < 1e4


def test_soundness_measures():
    eye = torch.eye(4)
    assert inverse_error(eye, eye) == 0 and condition_number(eye) == 1
    skewed = torch.stack([eye, torch.diag(torch.tensor([1.0, 1.0, 1.0, 100.0]))])
    assert condition_number(skewed) == pytest.approx(100)
    assert inverse_error(skewed, skewed) == pytest.approx(9999)
