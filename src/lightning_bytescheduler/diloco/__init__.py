"""DiLoCo with workers of unequal speed: rounds that end for all together, and a mean weighted by samples.

Some modules need neither Lightning nor a network, and can be used without a Trainer: the logic of rounds (``rounds``,
``round_counter``, ``round_end``) with its ``messages``; the record of a training (``round_record``); and the mean of
pseudo-gradients (``weighted_mean``, ``outer_optimizer``, ``fragments``). A project with its own network can carry the
messages over it: ``encode`` writes one as a line of JSON, and ``decode`` reads it.
"""
