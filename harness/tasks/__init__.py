"""Tasks that models are trained on here: function calls and SST-2."""
