"""Zeroth-order methods: they see losses only, and estimate gradients from them."""
