"""When DistributedDataParallel reduced: its own logger takes the times in C++, so nothing on the way is changed."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hvdtrain.backends.reductions import Reduction, ReductionWatch


class DdpReductions(ReductionWatch):
    """Asks the logger after each backward pass; it holds the times of the last one that communicated."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        module: Any = ddp
        # Every pass; by default it is one in a hundred.
        module._set_ddp_runtime_logging_sample_rate(1)
        # No reference to the module itself, which has to go before the process group.
        self._logger = module.logger
        self._last_started = self._read().get("backward_comm_time_start", 0)

    def _read(self) -> dict[str, int]:
        return dict(self._logger._get_ddp_logging_data().ints_map)

    def take(self) -> list[Reduction]:
        self._logger.set_runtime_stats_and_log()
        times = self._read()
        started = times.get("backward_comm_time_start", 0)
        if started == self._last_started:
            return []
        self._last_started = started
        return [Reduction(started, times["backward_compute_time_end"], times["backward_comm_time_end"])]
