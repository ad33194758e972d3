"""The LoRA adapters of other tools: their files, the names of their tensors, their settings."""
