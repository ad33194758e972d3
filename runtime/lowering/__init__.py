"""From a program to what runs, in order: schedules, tiles, frees and rematerialization."""
