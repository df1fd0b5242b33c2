"""From the handles that `update` returns to the attention output."""
