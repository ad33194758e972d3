"""Arrays in memory, and weights as they are stored: tiles, dequantizing, and products with them."""
