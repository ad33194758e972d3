"""A module a group of commands: each calls the work and prints."""
