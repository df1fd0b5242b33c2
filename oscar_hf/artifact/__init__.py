"""What is known of a model before its first token: configuration, transforms, where they come from."""
