"""Decode attention straight from 2-bit codes, as Triton kernels with their reference beside them."""
