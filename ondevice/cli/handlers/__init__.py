"""A module a group of commands: each checks its configuration, calls the work, and prints."""
