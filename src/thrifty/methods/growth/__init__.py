"""Incremental training: growing and skipping layers."""
