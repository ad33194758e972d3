"""The options of commands that write bundles, checkpoints and adapters."""
