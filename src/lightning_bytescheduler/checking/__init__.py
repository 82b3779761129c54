"""``lightning-bytescheduler check``: does *this* script train the same under ``ddp`` and under ``bytescheduler``?

A room of its own, as it imports the strategies, which know nothing of it, and as it runs in three kinds of processes:

- the command, or a notebook's process (``check.py``), starts the user's command once per run, with
  ``site/sitecustomize.py`` on its path, or forks the notebook; has runs compared and the answer put into words
  (``report.py``, which knows neither Lightning nor processes);
- in every Python process of the user's, that file registers our strategies; the registration reads the run from an
  environment variable and has ``injected.py`` replace the strategy, and ``recorder.py`` write down what the fit did.

Nothing here looks at a weight between two steps while ``bytescheduler`` trains: a look would open the gates and hide
the very reads of weights that are not final which are to be found. Losses are kept as they come; weights are read when
backward begins, where every update has landed anyway, and at the end.
"""
