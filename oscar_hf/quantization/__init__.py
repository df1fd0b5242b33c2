"""Pure mathematics and the packed format: no transformers, no configuration, no cache."""
