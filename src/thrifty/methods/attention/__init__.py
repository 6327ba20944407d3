"""Attention and packing."""
