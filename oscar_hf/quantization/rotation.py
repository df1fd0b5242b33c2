"""Pure mathematics of the transforms: Hadamard matrix, bit reversal, and covariance -> rotation or balanced transform.

Vectors are rows: `x_rot = x @ R`. Everything here is float64 on the CPU; an artifact stores the results as float32.
"""

import torch
from torch import Tensor


def power_of_two_blocks(dim: int) -> list[int]:
    """Split `dim` into its largest power-of-two blocks, largest first: 96 -> [64, 32], 128 -> [128]."""
    if dim < 1:
        raise ValueError(f"dim must be a positive integer, got {dim}")
    return [1 << bit for bit in range(dim.bit_length() - 1, -1, -1) if dim >> bit & 1]


def hadamard(dim: int) -> Tensor:
    """Orthonormal Sylvester Hadamard matrix, float64 [dim, dim], entries +-1/sqrt(block).

    A `dim` that is not a power of two gives the block-diagonal matrix over its `power_of_two_blocks`.
    """
    blocks = []
    for size in power_of_two_blocks(dim):
        block = torch.ones(1, 1, dtype=torch.float64)
        while block.shape[0] < size:
            block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)], 0)
        # Scaling once at the end keeps the entries exact whenever sqrt(size) is a power of two.
        blocks.append(block / size**0.5)
    return torch.block_diag(*blocks)


def bit_reversal(size: int) -> list[int]:
    """Bit reversal of 0..size-1 on log2(size) bits; `size` must be a power of two. 8 -> [0, 4, 2, 6, 1, 5, 3, 7]."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"size must be a power of two, got {size}")
    bits = size.bit_length() - 1
    return [int(format(i, f"0{bits}b")[::-1], 2) if bits else 0 for i in range(size)]


def bit_reversal_columns(dim: int) -> list[int]:
    """Column order P_br: column j of the result is column `bit_reversal_columns(dim)[j]` of the input.

    For a power of two it is dim-1-br(j) (dim 8 -> 7, 3, 5, 1, 6, 2, 4, 0), the order of the published rotations;
    otherwise the same rule inside each power-of-two block.
    """
    columns, offset = [], 0
    for size in power_of_two_blocks(dim):
        columns += [offset + size - 1 - reversed_index for reversed_index in bit_reversal(size)]
        offset += size
    return columns


def _deal_to_blocks(dim: int) -> list[int]:
    """Order in which ascending eigenvectors are dealt to the Hadamard blocks: each block sees the whole spectrum.

    The identity for a power of two. Without it the small block of D = 96, say, would hold the 32 largest eigenvalues.
    """
    blocks = power_of_two_blocks(dim)
    slots = [((i + 0.5) / size, block, i) for block, size in enumerate(blocks) for i in range(size)]
    rank_of = {(block, i): rank for rank, (_, block, i) in enumerate(sorted(slots))}
    return [rank_of[block, i] for block, size in enumerate(blocks) for i in range(size)]


def symmetrize(matrix: Tensor) -> Tensor:
    """(M + M^T) / 2 in float64, batched."""
    matrix = matrix.double()
    return (matrix + matrix.mT) / 2


def spectral_rotation(covariance: Tensor) -> Tensor:
    """R = U H P_br of a covariance [..., D, D]: orthogonal float64 [..., D, D] (arXiv 2605.17757).

    U holds the eigenvectors in ascending order of eigenvalue. For D a power of two, R^T C R has the constant diagonal
    tr(C)/D: every rotated channel carries the same energy.
    """
    dim = covariance.shape[-1]
    _, eigenvectors = torch.linalg.eigh(symmetrize(covariance))
    mixed = eigenvectors[..., _deal_to_blocks(dim)] @ hadamard(dim)
    return mixed[..., bit_reversal_columns(dim)]


def _matrix_function(matrix: Tensor, function) -> Tensor:
    """f(M) of a symmetric positive definite M through its eigendecomposition."""
    eigenvalues, eigenvectors = torch.linalg.eigh(symmetrize(matrix))
    return eigenvectors @ (function(eigenvalues.clamp(min=1e-30))[..., None] * eigenvectors.mT)


def regularize(covariance: Tensor, ridge: float = 1e-3) -> Tensor:
    """C + ridge * mean(diag C) * I, so that a near-singular covariance can be inverted."""
    covariance = symmetrize(covariance)
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    # A channel set that never varies (all zeros) still needs an invertible matrix.
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))
    return covariance + ridge * mean * torch.eye(covariance.shape[-1], dtype=torch.float64)


def balanced_transform(covariance: Tensor, query_covariance: Tensor, ridge: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Invertible transform A and its inverse that balance what sets the step against what an error costs.

    `covariance` C [..., D, D] is that of the (centered) keys, `query_covariance` C_Q [..., D, D] that of the queries.
    A A^T = C^-1/2 (C^1/2 C_Q C^1/2)^1/2 C^-1/2 minimises tr(A^T C A) tr(A^-1 C_Q A^-T); the
    orthogonal factor U H P_br then gives A^T C A a constant diagonal. Returns float64 (A, A^-1) with k' = k A and
    q' = q A^-T.
    """
    covariance, query_covariance = regularize(covariance, ridge), regularize(query_covariance, ridge)
    root, inverse_root = _matrix_function(covariance, torch.sqrt), _matrix_function(covariance, torch.rsqrt)
    gram = symmetrize(inverse_root @ _matrix_function(root @ query_covariance @ root, torch.sqrt) @ inverse_root)
    half, inverse_half = _matrix_function(gram, torch.sqrt), _matrix_function(gram, torch.rsqrt)
    rotation = spectral_rotation(half @ covariance @ half)
    return half @ rotation, rotation.mT @ inverse_half


def whitening_transform(covariance: Tensor, ridge: float, mix: Tensor) -> tuple[Tensor, Tensor]:
    """A = G^-T H and A^-1 = H^T G^T for the Cholesky factor G of C + ridge * mean(diag C) * I, [..., D, D], on C's device.

    Rows k' = k A of covariance C then have about the identity's: all channels are alike, so that one scale serves them, and
    `mix`, an orthogonal H [D, D], spreads what is not Gaussian over the channels. ridge bounds how much a direction that C hardly
    knows is lengthened.
    """
    covariance = (covariance + covariance.mT).double() / 2
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    # Without a look at whether it succeeded, which would wait for the device: the ridge sees to that.
    factor = torch.linalg.cholesky_ex(covariance + ridge * mean * eye)[0].mT
    mix = mix.to(factor).expand_as(factor)
    return torch.linalg.solve_triangular(factor, mix, upper=True), mix.mT @ factor


def inverse_error(transform: Tensor, inverse: Tensor) -> float:
    """max |A A^-1 - I|, the soundness measure of a transform and its stored inverse."""
    identity = torch.eye(transform.shape[-1], dtype=torch.float64, device=transform.device)
    return float((transform.double() @ inverse.double() - identity).abs().max())


def condition_number(transform: Tensor) -> float:
    """Largest ratio of singular values over the batch."""
    singular = torch.linalg.svdvals(transform.double())
    return float((singular[..., 0] / singular[..., -1].clamp(min=1e-300)).max())
