"""A module a command: it checks the configuration, calls the work, and prints the result."""
