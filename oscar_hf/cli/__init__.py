"""The `oscar-hf` command."""
