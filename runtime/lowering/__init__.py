"""Lowering programs to instructions: schedules, tiles, frees and rematerialization."""
