"""Settings of every command: frozen dataclasses filled from TOML files and flags."""
