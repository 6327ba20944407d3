"""Large batches and weight averaging."""
