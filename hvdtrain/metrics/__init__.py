"""What a run tells: metrics.jsonl, TensorBoard, the progress line, the log, summary.json. Written by rank 0 alone."""

from hvdtrain.metrics.logs import set_up_logging
from hvdtrain.metrics.meter import ThroughputMeter
from hvdtrain.metrics.parameters import parameters_sha256
from hvdtrain.metrics.progress import Progress
from hvdtrain.metrics.summary import Summary, clear_summary, end_report, write_summary
from hvdtrain.metrics.writer import MetricsWriter

__all__ = [
    "MetricsWriter",
    "Progress",
    "Summary",
    "ThroughputMeter",
    "clear_summary",
    "end_report",
    "parameters_sha256",
    "set_up_logging",
    "write_summary",
]
