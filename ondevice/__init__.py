"""Fine-tune language models with LoRA on the device that holds the data, inside a memory budget.

Importing this package loads nothing heavy: no MLX, no NumPy. The parts live in
`ondevice.bundle.store` (the format), `export` (checkpoint to bundle), `runtime` (training)
and `harness` (measuring).
"""

__version__ = "0.1.0"
