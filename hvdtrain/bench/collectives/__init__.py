"""`hvdtrain bench collectives`: all-reduce by parameter server, by ring, and by the backends; time and bytes.

lessons.py   the teaching code of examples/collectives      measure.py   ranks, sizes, times, the kernel's bytes
table.py     the result as Markdown                         plots.py     the picture
"""
