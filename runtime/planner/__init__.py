"""What a memory budget buys: pure arithmetic over lowered programs."""
