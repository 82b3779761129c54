"""What DiLoCo's workers do together when they are launched as one job: rounds, and the exchange of updates.

The logic of rounds is in ``diloco``; this room gives it threads, messages and a network.
"""
