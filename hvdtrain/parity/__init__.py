"""`hvdtrain parity`: a certificate that a job trains to the same weights under both backends, or of where it does not.

runs.py      which runs, and starting them      rank.py          one rank of one run
compare.py   the differences, as numbers        certificate.py   what is written about them
"""
