"""What each command does: checks its configuration, calls the work, and prints the result."""
