"""The report of a run: an HTML page, Markdown, figures as JSON and plots as SVG files.

`content.py` says what the report shows, from `tables.py`, `headline.py` and `plots.py`; `page.py` and `markdown.py`
render it; `files.py` reads a run's folder and writes the files.
"""
