"""`hvdtrain launch`: one command line starts the ranks of a job on every host, over ssh, with torchrun's agent on each.

hosts.py        -H and --hostfile, and which host gets which ranks
environment.py  what of the caller's environment travels
ssh.py          the ssh command line, and what its failures mean
probe.py        runs on a host: versions, addresses, a free port      (standard library alone, sent over ssh)
check.py        asks every host at once, and says what is wrong where
protocol.py     the lines between launcher and agent
agent.py        runs on a host: torchrun's agent, output, exit statuses, clean end
worker.py       becomes one rank: output into the agent's pipes, dies with the agent
connection.py   the launcher's end of one agent
job.py          all hosts of one job: streams, failures, signals, exit status
compose.py      the same job as a horovodrun or mpirun command line
"""
