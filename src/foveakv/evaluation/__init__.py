"""Evaluation: methods on tasks with known answers, comparisons with the full cache, and reports.

`items.py` defines tasks, and `tasks/` has the offline suite. `trial.py` runs methods on one item, `runner.py` runs a
plan of many, and `store.py` keeps the results in a folder. `summary.py` computes the figures and `report/` shows them.
`compare.py` compares methods on one prompt; `tune.py` finds the smallest budget that agrees with the full cache.
"""
