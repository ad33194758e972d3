"""What everything else stands on: errors, units, paths, files, documents, signals and notes."""
