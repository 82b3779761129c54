"""Choosing the credit, the partition size, and whether steps are plain DDP's. Only the callback imports Lightning."""
