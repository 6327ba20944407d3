"""Initialisation and normalisation-free residual networks."""
