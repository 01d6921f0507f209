"""A task that misbehaves: on one rank, at one microbatch, in one of many ways."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

import hvdtrain


class Numbers(Dataset):
    def __init__(self, size: int, stuck_rank: int | None) -> None:
        self.size, self.stuck_rank = size, stuck_rank

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.stuck_rank is not None and hvdtrain.world().rank == self.stuck_rank and get_worker_info() is not None:
            time.sleep(600)
        return torch.tensor([float(index % 7)])


class Faulty:
    """`fault` happens on `rank` before its microbatch number `at` (from 1); the moment is written to `note`."""

    def __init__(
        self,
        fault: str = "none",
        rank: int = 1,
        at: int = 5,
        step_s: float = 0.0,
        num_samples: int = 16000,
        note: str | None = None,
    ) -> None:
        self.fault, self.rank, self.at, self.step_s, self.num_samples = fault, rank, at, step_s, num_samples
        self.note = note
        self.calls = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def train_dataset(self) -> Dataset:
        return Numbers(self.num_samples, self.rank if self.fault == "stuck-worker" else None)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.step_s:
            time.sleep(self.step_s)
        if self.calls == self.at and hvdtrain.world().rank == self.rank:
            self._misbehave()
        return model(batch).square().mean()

    def _misbehave(self) -> None:
        if self.note is not None:
            Path(self.note).write_text(str(time.time()))
        if self.fault == "raise":
            raise ValueError("a bad batch")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fault == "exit":
            sys.exit(0)
        if self.fault == "exit-hard":
            os._exit(0)
        if self.fault == "sleep":
            time.sleep(600)
        if self.fault in ("SIGTERM", "SIGINT", "SIGUSR1"):
            os.kill(os.getpid(), getattr(signal, self.fault))
