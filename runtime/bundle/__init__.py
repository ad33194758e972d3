"""The bundle: an exported model on disk, its manifest, and the checks before it is used."""
