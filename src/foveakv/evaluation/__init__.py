"""Evaluation: tasks with known answers, methods run on the same items, results that survive a kill, reports.

`items.py` says what a task is, `tasks/` has the offline suite, `trial.py` runs one method on one item, `runner.py` runs
them all, `results.py` keeps what came out, `summary.py` and `report.py` make tables and pages of it.
"""
