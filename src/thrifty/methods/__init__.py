"""The techniques, one module each, one folder a section of the survey."""
