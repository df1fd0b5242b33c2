"""What transformers sees: the cache, its layers, and how they are saved and loaded."""
