"""Benchmarks: speed as ratios, measured side by side in one run, never asserted by tests.

ranks.py       starts local ranks for a benchmark       blocks.py      interleaved blocks of steps, ratios
workloads.py   the models and data                      raw_loops.py   what a person writes by hand
overhead.py    the trainer against the raw loops
"""
