"""From text to rows of tokens."""
