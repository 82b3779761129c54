"""``lightning-bytescheduler check``: does *this* script train the same under ``ddp`` and under ``bytescheduler``?

The package is separate because it imports the strategies, which know nothing of it, and because it runs in three kinds
of processes:

- ``check.py`` runs in the command's process or a notebook's. It starts the user's command once per run, with
  ``site/sitecustomize.py`` on its path, or forks the notebook. It has the runs compared and the result put into words
  by ``report.py``, which knows neither Lightning nor processes.
- In every Python process of the user's, that file registers our strategies. The registration reads the run from an
  environment variable. Then ``injected.py`` replaces the strategy, and ``recorder.py`` writes down what the fit did.

Nothing here looks at a weight between two steps while ``bytescheduler`` trains: that would open the gates, and hide the
very reads of unfinished weights that the check looks for. Losses are recorded as they come. Weights are read when the
backward pass begins, where every update has landed anyway, and at the end.
"""
