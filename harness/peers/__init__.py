"""Other trainers, measured beside this one."""
