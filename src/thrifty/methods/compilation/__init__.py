"""Compiling the model."""
