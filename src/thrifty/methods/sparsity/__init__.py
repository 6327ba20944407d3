"""Sparse training."""
