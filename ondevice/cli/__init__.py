"""The command line: `ondevice.cli.main.main` runs a command and returns its exit code."""
