"""The options of commands that train or use a bundle, and how options are declared."""
