"""``predict``: the measurement of a step of the user's module, its prediction on a network, and the command.

``link``, ``profiles``, ``simulator`` and ``prediction`` import neither Lightning nor torch.
"""
