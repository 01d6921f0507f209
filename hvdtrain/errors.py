"""Errors and exit statuses. One tree, so that the command line needs to catch one class.

HvdtrainError              anything we raise on purpose
|- UserError               the input is wrong: nothing was started               exit status 2
|  |- ConfigError          the job file (file, line, key)
|  |- LaunchError          the launcher's environment, flags, addresses
|  `- CheckpointError      a resume that was asked for and cannot be done
|- TrainingFailed          the job started and failed                             exit status 1
|  |- ContractError        the caller broke a clause of Backend or Replica
|  |- CollectiveError      a collective failed, or ranks disagree
|  `- PeerLost             another rank failed, died or went silent
`- StopRequested           stopped on request; a checkpoint was saved             exit status 75
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
# EX_TEMPFAIL of sysexits.h: "try again later", what batch systems requeue on.
EXIT_STOPPED = 75


class HvdtrainError(Exception):
    """Anything hvdtrain raises on purpose. The message says what, where, and what to do next."""

    exit_status = EXIT_FAILED


class UserError(HvdtrainError):
    """The user's input is wrong; the job was not started."""

    exit_status = EXIT_USER_ERROR


class ConfigError(UserError):
    """The job file or an override is wrong; the message names file, line and key."""


class LaunchError(UserError):
    """The launcher's variables, the flags or the addresses are wrong or contradict each other."""


class CheckpointError(UserError):
    """A checkpoint that was asked for is missing, damaged or does not fit."""


class TrainingFailed(HvdtrainError):
    """The job started and then failed."""


class ContractError(TrainingFailed):
    """The caller broke a clause of the Backend or Replica contract."""


class CollectiveError(TrainingFailed):
    """A collective failed or the ranks disagree about it."""


class PeerLost(TrainingFailed):
    """Another rank failed, died or went silent."""


class StopRequested(HvdtrainError):
    """The job stopped because somebody asked; a checkpoint was saved."""

    exit_status = EXIT_STOPPED
