"""The loss and what surrounds it."""
