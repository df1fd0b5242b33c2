"""Triton kernels, each beside the plain-PyTorch reference with the same signature that specifies it."""
