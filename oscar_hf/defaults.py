"""Defaults that the command line and the functions behind it share. Imports nothing: the command line reads it."""

# Tokens that an artifact is calibrated on.
CALIBRATION_TOKENS = 32768
# Longest sequence that they are cut into. Keys drift with the position (RoPE's slow channels), so constants hold for the
# positions that they were made from.
LONGEST_CONTEXT = 32768
# Sequences that `oscar-hf eval` judges, and their length.
EVALUATION_SEQUENCES = 4
EVALUATION_CONTEXT = 4096
# Tokens that `oscar-hf plan` counts for, unless the model takes fewer.
PLAN_CONTEXT = 32768
