"""Activations and optimizer states on the host or on disk."""
