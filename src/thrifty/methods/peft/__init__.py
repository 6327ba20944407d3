"""Parameter-efficient tuning."""
