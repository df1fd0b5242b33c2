"""What is asked of transformers itself: its versions and model classes, a model's config, when generate() stops."""
