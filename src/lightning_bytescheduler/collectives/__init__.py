"""Collectives of torch.distributed that tasks start, and how ranks agree on one order and on failures."""
