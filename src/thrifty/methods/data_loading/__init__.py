"""Batches and data loading."""
