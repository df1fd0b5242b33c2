"""Every difference between versions of transformers and every question about a model config."""
