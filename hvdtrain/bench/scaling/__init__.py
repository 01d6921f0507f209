"""`hvdtrain bench scaling`: what more ranks bring.

measure.py   the same job on 1, 2, 4, ... ranks     table.py   Markdown     plots.py   the curve against the ideal
"""
