"""Measure the recipe on one host and on two, and write the table of RESULTS.md.

    python examples/asr/table.py --data FOLDER [--output runs/asr-table] [--results RESULTS.md]

The hosts are network namespaces of this machine with a shaped link between them (needs root), and one rank each, on a
core of its own. Every row takes the same steps: eight microbatches each, on one host accumulated, on two hosts four on
each. Trainings with three seeds give the character error rates; rows that are about speed alone stop after a few steps.
What has been measured already (a row's folder in --output) is not measured again, so that it can be done in parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import click

from hvdtrain.bench.hosts import NamespaceHosts, format_rate, namespace_hosts, parse_rate
from hvdtrain.bench.machine import machine, machine_text
from hvdtrain.bench.placed.processes import wait_for_all
from hvdtrain.bench.stop_signals import stop_signals_raise
from hvdtrain.errors import HvdtrainError, UserError
from hvdtrain.launch.host import usable_cpus

HERE = Path(__file__).resolve().parent
MICROBATCHES_PER_STEP = 8
PORT = 29500


@dataclasses.dataclass(frozen=True)
class Row:
    """A way to train.

    Attributes:
        name: of its folders.
        num_hosts: hosts, and ranks.
        settings: keys of the job file.
        trained: to the end, with every seed; else a few steps, for the speed alone.
        copies: independent trainings at once, each on a core of its own.
    """

    name: str
    num_hosts: int
    settings: tuple[str, ...]
    trained: bool
    copies: int = 1

    @property
    def accumulate(self) -> int:
        """Microbatches of a rank in a step: the same effective batch in every row."""
        return MICROBATCHES_PER_STEP // self.num_hosts


ROWS = (
    Row("one-host", 1, (), True),
    Row("two-hosts", 2, ("compression=fp16",), True),
    # What the two cores cost each other, which two machines would not.
    Row("one-host-twice", 1, (), False, copies=2),
    Row("two-hosts-fp32", 2, (), False),
    Row("two-hosts-sync-fp32", 2, ("sync_every_microbatch=true",), False),
    Row("two-hosts-horovod", 2, ("backend=horovod", "compression=fp16"), False),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a training gave. bytes_per_step: what one host's link sent; None on one host."""

    utterances_per_s: float
    num_utterances: int
    steps: int
    epochs: int
    bytes_per_step: float | None
    cer: dict[str, float]

    @property
    def epoch_s(self) -> float:
        """Time of an epoch without evaluation and checkpoints."""
        return self.num_utterances / self.utterances_per_s

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return self.epoch_s * self.epochs / self.steps


class Bench:
    """Runs rows.

    Args:
        bits_per_s: of each host's link.
        speed_steps: steps of a row that is about speed alone.
    """

    def __init__(
        self, data: Path, output: Path, config: Path, bits_per_s: float, speed_steps: int, settings: tuple[str, ...]
    ) -> None:
        self.data, self.output, self.config, self.settings = data, output, config, settings
        self.bits_per_s, self.speed_steps = bits_per_s, speed_steps
        self.cpus = sorted(usable_cpus())
        self.num_measured = 0
        if len(self.cpus) < 2:
            raise UserError("two hosts with a core each need a machine with two cores")

    def result(self, row: Row, seed: int) -> Result:
        """Of an earlier call, or measured now."""
        file = self.output / f"{row.name}-{seed}" / "result.json"
        if not file.is_file():
            # What an interrupted call left is begun anew: bytes and times are those of whole trainings.
            part = file.parent.with_name(f"{file.parent.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            found = self._measure(row, seed, part)
            (part / file.name).write_text(json.dumps(dataclasses.asdict(found), indent=2) + "\n")
            part.rename(file.parent)
            self.num_measured += 1
        return Result(**json.loads(file.read_text()))

    def _measure(self, row: Row, seed: int, folder: Path) -> Result:
        options = [f"task_options.data={self.data}", f"accumulate={row.accumulate}", f"seed={seed}", *row.settings]
        if not row.trained:
            options += [f"max_steps={self.speed_steps}", "task_options.eval_splits=[]", "checkpoint.every_steps=null"]
        line = [sys.executable, "-m", "hvdtrain", "train", str(self.config)]
        line += [part for option in (*self.settings, *options) for part in ("--set", option)]
        folders = [folder, *(folder / f"copy-{number}" for number in range(1, row.copies))]
        print(f"== {row.name}, seed {seed}", flush=True)
        with contextlib.ExitStack() as stack:
            if row.num_hosts == 1:
                sent = None
                pinned = zip(self.cpus, folders, strict=False)
                self._run([["taskset", "-c", str(cpu), *line, "--output", str(own)] for cpu, own in pinned])
            else:
                hosts = stack.enter_context(namespace_hosts(row.num_hosts, self.bits_per_s))
                sent = self._run_on(hosts, [*line, "--output", str(folder)])
        summaries = [json.loads((own / "summary.json").read_text()) for own in folders]
        for own, summary in zip(folders, summaries, strict=True):
            if summary["status"] != "done" or not summary["ranks_agree"]:
                raise UserError(f"{own}/summary.json: not a training that ended well")
        summary = summaries[0]
        listing = self.data / "prepared" / "train.list"
        return Result(
            statistics.mean(each["samples_per_second"] for each in summaries),
            len(listing.read_text(encoding="utf-8").splitlines()),
            summary["steps"],
            summary["epochs"],
            None if sent is None else sent / summary["steps"],
            {key: value for key, value in summary["eval"].items() if key.startswith("cer")},
        )

    def _run_on(self, hosts: NamespaceHosts, line: list[str]) -> int:
        """Run it with a rank on every host; returns the bytes that the first one's link sent."""
        before = hosts[0].traffic()
        lines = []
        for rank, (host, cpu) in enumerate(zip(hosts, self.cpus, strict=False)):
            meeting = ["--init-method", f"tcp://{hosts[0].address}:{PORT}", "--world-size", str(len(hosts))]
            pinned = ["taskset", "-c", str(cpu), *line, *meeting, "--rank", str(rank)]
            lines.append(host.command(pinned))
        self._run(lines)
        return (hosts[0].traffic() - before).sent_bytes

    def _run(self, lines: list[list[str]]) -> None:
        environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, "OMP_NUM_THREADS": "1"}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes += [subprocess.Popen(line, env=environment) for line in lines]
        finally:
            wait_for_all(processes, 3600.0 if len(processes) == len(lines) else 0.0)


def report(bench: Bench, results: dict[Row, list[Result]], seeds: list[int]) -> str:
    """RESULTS.md."""
    one, two = (results[row] for row in ROWS[:2])
    base = statistics.mean(result.utterances_per_s for result in one)
    heads = ["hosts", "link", "backend", "accumulate", "no_sync", "compression", "epoch, s", "utterances/s", "speed-up"]
    heads += ["MB sent per step and host", "CER dev", "CER test"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row, found in results.items():
        lines.append(_line(row, found, base, bench.bits_per_s))
    speed = statistics.mean(result.utterances_per_s for result in two)
    cers = {
        split: [[result.cer[f"cer_{split}"] for result in found] for found in (one, two)] for split in ("dev", "test")
    }
    said = []
    for split, (of_one, of_two) in cers.items():
        means = statistics.mean(of_one), statistics.mean(of_two)
        said.append(
            f"{split}: means {means[0]:.2%} and {means[1]:.2%}, apart by {abs(means[0] - means[1]):.2%}; "
            f"one host's seeds spread over {max(of_one) - min(of_one):.2%}"
        )
    pairs = zip(one, two, strict=True)
    figures = ", ".join(f"{of_two.utterances_per_s / of_one.utterances_per_s:.2f}" for of_one, of_two in pairs)
    values = {
        "table": "\n".join(lines),
        "machine": machine_text(machine()),
        "date": datetime.date.today().isoformat(),
        "rate": format_rate(bench.bits_per_s),
        "seeds": ", ".join(map(str, seeds)),
        "speed_steps": bench.speed_steps,
        "speed_up": f"{speed / base:.2f}",
        "each": figures,
        "cers": "\n".join(f"- {line}." for line in said),
        "bound_ms": f"{(two[0].bytes_per_step or 0) * 8 / bench.bits_per_s * 1e3:.0f}",
        "per_step": f"{two[0].num_utterances * two[0].epochs / two[0].steps:.0f}",
        "naive": f"{_named(results, 'two-hosts-sync-fp32').utterances_per_s / base:.2f}",
        "beside": f"{_named(results, 'one-host-twice').utterances_per_s / base:.2f}",
        "speed_up_beside": f"{speed / _named(results, 'one-host-twice').utterances_per_s:.2f}",
        "step_ms": f"{statistics.mean(result.step_s for result in two) * 1e3:.0f}",
    }
    text = (HERE / "results_template.md").read_text()
    for name, value in values.items():
        text = text.replace("{" + name + "}", str(value))
    return text


def _named(results: dict[Row, list[Result]], name: str) -> Result:
    return next(found[0] for row, found in results.items() if row.name == name)


def _line(row: Row, found: list[Result], base: float, bits_per_s: float) -> str:
    speed = statistics.mean(result.utterances_per_s for result in found)
    settings = dict(setting.split("=") for setting in row.settings)
    sent = [result.bytes_per_step for result in found if result.bytes_per_step is not None]
    several = row.num_hosts > 1
    return " | ".join(
        [
            f"| {row.num_hosts}" + (f" ({row.copies} jobs at once, the mean)" if row.copies > 1 else ""),
            format_rate(bits_per_s) if several else "none",
            settings.get("backend", "ddp") if several else "ddp",
            str(row.accumulate),
            ("off" if settings.get("sync_every_microbatch") else "on") if several else "",
            settings.get("compression", "none") if several else "",
            ", ".join(f"{result.epoch_s:.1f}" for result in found),
            f"{speed:.1f}",
            f"{speed / base:.2f}",
            f"{statistics.mean(sent) / 1e6:.2f}" if sent else "0",
            ", ".join(f"{result.cer['cer_dev']:.2%}" for result in found) if row.trained else "not trained",
            (", ".join(f"{result.cer['cer_test']:.2%}" for result in found) if row.trained else "not trained") + " |",
        ]
    )


@click.command(help=__doc__)
@click.option("--data", required=True, type=click.Path(path_type=Path, exists=True), help="The prepared corpus.")
@click.option("--output", default=Path("runs/asr-table"), show_default=True, type=click.Path(path_type=Path))
@click.option("--results", default=HERE / "RESULTS.md", type=click.Path(path_type=Path), help="The text to write.")
@click.option("--config", default=HERE / "asr.yaml", type=click.Path(path_type=Path), help="Another job file.")
@click.option("--bandwidth", default="1gbit", show_default=True, help="Of each host's link.")
@click.option("--seeds", default=3, show_default=True, help="Trainings of each row.")
@click.option("--speed_steps", default=40, show_default=True, help="Steps of the rows that are about speed alone.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Of every row, as in `hvdtrain train`.")
@click.option("--rows", multiple=True, help="Measure these rows alone, for a start, and write nothing.")
@click.option("--max_runs", type=int, help="Stop after so many trainings; called again, it goes on.")
def main(
    data: Path,
    output: Path,
    results: Path,
    config: Path,
    bandwidth: str,
    seeds: int,
    speed_steps: int,
    settings: tuple[str, ...],
    rows: tuple[str, ...],
    max_runs: int | None,
) -> None:
    numbers = list(range(1, seeds + 1))
    try:
        bench = Bench(data, output, config, parse_rate(bandwidth), speed_steps, settings)
        found: dict[Row, list[Result]] = {row: [] for row in ROWS}
        # One host and two in turns: what changes on the machine in the course of it meets both.
        with stop_signals_raise():
            for seed in numbers:
                for row in ROWS:
                    if (row.trained or seed == 1) and (not rows or row.name in rows):
                        found[row].append(bench.result(row, seed))
                    if max_runs is not None and bench.num_measured >= max_runs:
                        print("stopped after --max_runs; the same line goes on")
                        return
        if rows:
            return
        results.write_text(report(bench, found, numbers))
    except HvdtrainError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_status) from None
    print(f"wrote {results}")


if __name__ == "__main__":
    main()
