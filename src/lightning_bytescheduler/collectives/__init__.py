"""What a task's start does on torch.distributed, and how ranks agree on one order and on each other's failures."""
