"""Input from elsewhere, changed at random and read: refused in words, or read as it is."""
