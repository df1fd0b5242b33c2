"""Statistics of a model turned into an artifact, and how good an artifact is."""
