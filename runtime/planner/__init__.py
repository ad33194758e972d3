"""Memory plans for a budget, by pure arithmetic over lowered programs."""
