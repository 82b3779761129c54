"""DiLoCo with workers of unequal speed: rounds that end for all together, and a mean weighted by samples.

What can be used without a Trainer is in modules that need neither Lightning nor a network: the logic of rounds
(``batch_scheduler``, ``round_counter``, ``round_end``, ``projection``) with its ``messages``; the record of a training
(``round_record``, ``picture``); and the mean of pseudo-gradients (``weighted_mean``, ``outer_optimizer``,
``fragments``). Who has a network of his own carries the messages over it: ``encode`` writes one as a line of JSON, and
``decode`` reads it.
"""
