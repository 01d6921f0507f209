"""The one loop, for every backend.

run.py         a whole job: connect, build, resume, train, evaluate, save, report
loop.py        epochs and steps                  weights.py     the weighted mean over microbatches and ranks
control.py     what ranks agree on beside backward: stop, end of data, weights, the logged loss
schedule.py    learning rate                     evaluation.py  exact sharded evaluation
epoch_watch.py what a script that drives the trainer is told
progress.py    where the run is                  saving.py      what goes into a checkpoint and comes out of it
"""

from hvdtrain.trainer.epoch_watch import EpochWatch
from hvdtrain.trainer.run import connect_options, train, train_on

__all__ = ["EpochWatch", "connect_options", "train", "train_on"]
