"""Other trainers, and running each of them in a process that is measured like ours."""
