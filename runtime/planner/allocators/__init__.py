"""Models of the memory that an allocator holds beyond what is in use."""
