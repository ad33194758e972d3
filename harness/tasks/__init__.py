"""Tasks to train models on: function calls and SST-2."""
