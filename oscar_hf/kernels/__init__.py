"""Triton kernels and the plain-PyTorch references that specify them.

`append`, `dequantize` and `decode_step` hold each operation twice: as a reference, `NAME_reference`, and as one launch with
the same signature, `NAME_triton`. `append_rows` and `dequantize_rows` also choose between the two; who calls `decode_step` asks
`place_problem` first, and who calls `decode` asks `launch_problem` and `decode_problem`. `encode` and `scale_search` are the
device code that append and the step share. `decode` is a package of its own, with its references in `decode.reference`;
`launch` says whether kernels can run at all.
"""
