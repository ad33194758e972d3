"""Models of what a memory allocator holds beyond what is alive."""
