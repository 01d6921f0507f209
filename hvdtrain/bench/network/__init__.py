"""`hvdtrain bench network`: what a step costs over a network, and how far that is from what the wire allows.

bound.py     bytes and times that cannot be beaten      measure.py   the runs of one table
table.py     Markdown                                   plots.py     pictures
link.py      what a link that nobody shaped can do
"""
