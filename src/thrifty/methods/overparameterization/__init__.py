"""Over-parameterisation: more weights in training than in the result."""
