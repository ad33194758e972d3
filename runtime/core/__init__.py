"""The foundation of all folders: errors, units, paths, files, documents, signals and notes."""
