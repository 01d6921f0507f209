"""What scripts import from `horovod.common`: exceptions, process sets, elastic state."""
