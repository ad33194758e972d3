"""What becomes of a bundle and an adapter elsewhere: checkpoints, GGUF files, and bundles again."""
