"""Benchmarks: speed as ratios, measured side by side in one run, never asserted by tests.

ranks.py       starts local ranks for a benchmark       blocks.py      interleaved blocks of steps, ratios
workloads.py   the models and data                      raw_loops.py   what a person writes by hand
overhead.py    the trainer against the raw loops
network/       over links of several bandwidths         scaling/       on more and more ranks
collectives/   ways to all-reduce
hosts/         hosts to measure on, links, bytes        placed/        ranks on those or on real hosts
timing.py      the trainer's steps on a placed rank     jobs.py        what is trained where nobody says
machine.py     machine and job, for the reader          plots.py       what pictures share
"""
