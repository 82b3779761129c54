"""Data in slices: handed out as they are needed, to workers of any speed, and never lost. Does not import Lightning."""
