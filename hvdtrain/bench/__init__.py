"""Benchmarks: speed as ratios, measured side by side in one run, never asserted by tests.

ranks.py       starts local ranks for a benchmark       blocks.py      times of interleaved blocks, their ratios
workloads.py   the models and data                      contest.py     whole jobs take turns; turns.py: a rank's side
overhead.py    the trainer against loops by hand        overhead_loops.py   one rank of them
hvd.py         one Horovod script under several Horovods; hvd_*.py: what it runs and how that is started
network/       over links of several bandwidths         scaling/       on more and more ranks
collectives/   ways to all-reduce
hosts/         hosts to measure on, links, bytes        placed/        ranks on those or on real hosts
timing.py      the trainer's steps on a placed rank     jobs.py        what is trained where nobody says
machine.py     machine and job, for the reader          plots.py       what pictures share
"""
