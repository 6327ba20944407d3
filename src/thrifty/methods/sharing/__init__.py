"""Parameters that several layers share."""
