"""Data selection."""
