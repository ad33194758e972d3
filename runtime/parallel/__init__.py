"""Several workers of one run: what they exchange, and over what."""
