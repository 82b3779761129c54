"""Between DDP and the scheduler: buckets become tasks, touching a parameter becomes a gate, steps become deferred.

Imports neither Lightning nor torch.distributed's collectives; it is driven by a strategy and sends through a callable.
"""
