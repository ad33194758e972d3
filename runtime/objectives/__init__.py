"""Objectives of training, one file each: losses with a gradient, and shares of right answers."""
