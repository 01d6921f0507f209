"""See `horovod.runner.util`."""
