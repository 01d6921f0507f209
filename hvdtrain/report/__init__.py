"""`hvdtrain report`: runs and benchmark results as one HTML page that needs nothing but a browser.

sources.py   reads output folders and result files     charts.py   small SVG pictures in the page's colours
runs.py      the sections about training runs          results.py  the sections about benchmarks and parity
page.py      the page                                  style.py    its style sheet      markup.py  escaping, tables
"""

from hvdtrain.report.page import write_report

__all__ = ["write_report"]
