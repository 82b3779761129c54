"""DiLoCo with performance-aware scheduling (seed 004). Pure: no Lightning, no torch.distributed, no sockets."""
