"""Passes over the blocks of a checkpoint's own model, which calibrate and measure an export."""
