"""`hvdtrain train --profile`: where a step's time goes, and a trace of some steps.

step_clock.py   the spans of a step                     breakdown.py    from steps to a table
watched.py      stand-ins that tell the clock           trace_file.py   one file of everything that was recorded
tracer.py       torch.profiler, for a few steps         profile.py      all of it together

Nothing here is in the way of a run without --profile: the trainer is given stand-ins for the things that it calls.
"""

from hvdtrain.profiling.profile import Profile, Profiled

__all__ = ["Profile", "Profiled"]
