"""The report: what it reads, what it shows, what it says when there is nothing to show."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys

import pytest

from hvdtrain.errors import UserError
from hvdtrain.report import write_report
from hvdtrain.report.markup import markdown
from hvdtrain.report.sources import read_sources

pytest.importorskip("matplotlib")
from hvdtrain.report import charts


def summary(**changes):
    world = {"rank": 0, "size": 2, "local_rank": 0, "local_size": 2, "node_rank": 0, "num_nodes": 1}
    document = {
        "status": "done",
        "backend": "ddp",
        "launcher": "torchrun",
        "transport": "gloo",
        "world": world,
        "steps": 20,
        "epochs": 2,
        "skipped_steps": 0,
        "samples_per_second": 1620.4,
        "eval": {"accuracy": 0.983},
        "parameters_sha256": "ab" * 32,
        "ranks_agree": True,
    }
    return {**document, **changes}


def make_run(folder, *, lines=None, **changes):
    folder.mkdir(parents=True)
    if lines is None:
        lines = [
            {
                "step": 10,
                "epoch": 0,
                "loss": 2.0,
                "grad_norm": 1.0,
                "lr": 0.1,
                "samples_per_second": 1600.0,
                "ctc": 3.0,
            },
            {"step": 10, "epoch": 1, "eval": {"accuracy": 0.9, "cer": 0.3}},
            {
                "step": 20,
                "epoch": 1,
                "loss": 1.0,
                "grad_norm": None,
                "lr": 0.1,
                "samples_per_second": 1650.0,
                "ctc": 2.0,
            },
        ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if changes.get("summary", True) is not None:
        (folder / "summary.json").write_text(json.dumps(summary(**changes)))
    return folder


def text_of(page: str) -> str:
    """What a person reads, with single spaces."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)))


def test_one_run(tmp_path):
    path = write_report([make_run(tmp_path / "mnist")])
    assert path == tmp_path / "mnist" / "report.html"
    page = path.read_text()
    text = text_of(page)
    for shown in ("mnist", "done", "ddp over gloo", "2 on 1 host", "1,620", "accuracy 0.983", "started by torchrun"):
        assert shown in text
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert titles == [
        "Loss",
        "Evaluation: accuracy",
        "Evaluation: cer",
        "Learning rate",
        "Samples per second",
        "Norm of the gradient",
        "ctc",
    ]
    # One run: no legend, no comparison, and without --profile no shares.
    assert 'class="legend"' not in page
    assert "Throughput" not in text
    assert "step's time" not in text


def test_the_page_needs_nothing_from_outside_and_follows_the_readers_colours(tmp_path):
    page = write_report([make_run(tmp_path / "a"), make_run(tmp_path / "b")], tmp_path / "out" / "x.html").read_text()
    assert not re.search(r"\b(src|href)\s*=\s*\"(?!#)|@import|url\((?!#)|http", page)
    assert page.count("<svg") == page.count("</svg>") == 8
    assert page.count('role="img" aria-label="') == 8
    assert not re.search("#01020[0-9]|#04050[0-9]|#07080[0-9]", page)
    for name in set(re.findall(r"var\((--[\w-]+)\)", page)):
        # Once for the light page and once for the dark one.
        assert page.count(f"{name}: ") == 2, name


def test_several_runs_are_compared(tmp_path):
    folders = [
        make_run(tmp_path / "ddp"),
        make_run(tmp_path / "horovod", backend="horovod", samples_per_second=810.2, skipped_steps=3),
    ]
    page = write_report(folders, tmp_path / "report.html").read_text()
    text = text_of(page)
    assert "2 runs" in text
    assert "horovod horovod 2 810.2 405.1 50.0%" in text
    assert "3 steps skipped" in text
    legend = re.search(r'<div class="legend">(.*?)</div>', page).group(1)
    assert [re.sub("<[^>]*>", "", key) for key in re.findall(r'<span class="key">.*?</span>', legend)] == [
        "ddp",
        "horovod",
    ]


def test_runs_of_the_same_name_go_by_their_paths(tmp_path):
    runs, _ = read_sources([make_run(tmp_path / "x" / "mnist"), make_run(tmp_path / "y" / "mnist")])
    assert [run.name for run in runs] == [str(tmp_path / "x" / "mnist"), str(tmp_path / "y" / "mnist")]


def test_where_a_steps_time_goes(tmp_path):
    milliseconds = {
        "data_wait": 1.0,
        "forward": 20.0,
        "backward": 50.0,
        "communication": 20.0,
        "optimizer": 8.0,
        "other": 1.0,
    }
    profile = {
        "steps": 15,
        "traced": True,
        "step_ms": 100.0,
        "phases": {name: {"ms": ms, "share": ms / 100, "ms_of_ranks": [ms, ms]} for name, ms in milliseconds.items()},
        "communication": {"under_way_ms": 50.0, "not_hidden_ms": 20.0, "not_hidden_share": 0.4},
        "traces": [],
    }
    text = text_of(write_report([make_run(tmp_path / "a", profile=profile)]).read_text())
    assert "a 100.00 1.0% 20.0% 50.0% 20.0% 8.0% 1.0% 50.00 40%" in text
    assert "a: while the steps were traced, which slows them" in text


def test_a_failed_run_shows_what_failed(tmp_path):
    failure = {"rank": 1, "host": "node-2", "message": "ValueError: <bad> batch", "traceback": "Traceback:\n  File <x>"}
    page = write_report([make_run(tmp_path / "a", status="failed", failure=failure)]).read_text()
    assert "a: rank 1 on node-2 failed first: ValueError: &lt;bad&gt; batch" in page
    assert "<pre>Traceback:\n  File &lt;x&gt;</pre>" in page


def test_a_run_that_is_still_going_on(tmp_path):
    folder = make_run(tmp_path / "a", summary=None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "los')
    runs, _ = read_sources([folder])
    assert (len(runs[0].steps), len(runs[0].evals), runs[0].num_unreadable) == (2, 1, 1)
    text = text_of(write_report([folder]).read_text())
    assert "no summary" in text
    assert "still running, or killed" in text
    assert "accuracy 0.9, cer 0.3" in text


def test_losses_that_are_not_finite_leave_gaps(tmp_path):
    lines = [{"step": step, "epoch": 0, "loss": None if step == 2 else 1.0} for step in range(1, 5)]
    page = write_report([make_run(tmp_path / "a", lines=lines)]).read_text()
    assert "1 logged steps were not finite and leave gaps." in page


def test_long_curves_are_thinned_to_means():
    x, y = charts.thinned(list(range(1000)), [float(i) for i in range(999)] + [math.nan])
    assert len(x) == len(y) == 334
    assert (x[0], y[0]) == (1.0, 1.0)
    assert (x[332], y[332]) == (997.0, 997.0)
    assert math.isnan(y[333])
    assert charts.thinned([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


def test_markdown_of_the_benchmarks():
    page = markdown("## 1 Gbit/s\n\n| a | b |\n|---|---|\n| `x<y` | 1.5 |\n| **bad** | 2 |\n\nSome\ntext.")
    assert "<h3>1 Gbit/s</h3>" in page
    assert "<td><code>x&lt;y</code></td><td class=n>1.5</td>" in page
    assert "<th>a</th><th class=n>b</th>" in page
    assert "<td><strong>bad</strong></td>" in page
    assert "<p>Some text.</p>" in page


SCALING = {
    "machine": {"processor": "P", "cores": 2, "memory_gib": 24, "kernel": "6", "python": "3.11", "torch": "2.13.0"},
    "job": {"task": "m:T", "task_options": {}, "batch_size": 8, "accumulate": 1, "compression": "none"},
    "sharing": None,
    "rounds": 5,
    "rows": [
        {
            "backend": "ddp",
            "hosts": 1,
            "ranks": ranks,
            "num_steps_per_gpu": 1000 // ranks,
            "avg_step_time": 0.1,
            "step_ms": 100.0,
            "step_ms_rounds": [100.0],
            "samples_per_s": 80.0 * ranks,
            "steps_per_s": 10.0,
            "speed_up": float(ranks),
            "efficiency": 1.0,
        }
        for ranks in (1, 2)
    ],
}


def test_a_scaling_result_beside_a_run(tmp_path):
    (tmp_path / "scaling.json").write_text(json.dumps(SCALING))
    page = write_report([make_run(tmp_path / "a"), tmp_path / "scaling.json"], tmp_path / "r.html").read_text()
    text = text_of(page)
    assert "ddp 1 2 500 0.1000 160 2.00 100%" in text
    assert "Throughput against the number of ranks" in text
    assert text.index("Loss") < text.index("Scaling")


def test_a_result_of_the_collectives(tmp_path):
    rows = [
        {
            "way": way,
            "ranks": ranks,
            "bytes": 4_000_000,
            "ms": 12.5,
            "sent_bytes": [4_100_000] * ranks,
            "received_bytes": [4_200_000] * ranks,
            "expected_sent_bytes": [4_000_000] * ranks,
            "ratio_sent": 1.025,
        }
        for ranks in (2, 3)
        for way in ("server", "ring")
    ]
    result = {"machine": SCALING["machine"], "sharing": None, "rounds": 5, "bits_per_s": None, "rows": rows}
    (tmp_path / "collectives.json").write_text(json.dumps(result))
    text = text_of(write_report([tmp_path]).read_text())
    assert "3 ring 12.5 4.10 4.20 4.10 1.025" in text
    assert "Sent by the busiest host of 4 MB" in text


PARITY = {
    "passed": False,
    "job": {"file": "job.yaml", "task": "m:T", "steps": 2, "ranks": 2, "seed": 1, "precision": "fp32"},
    "comparisons": [
        {
            "first": "ddp",
            "second": "horovod",
            "passed": False,
            "problems": ["the loss is beyond the tolerance from step 2 on"],
            "tolerance": 1e-5,
            "loss": {"largest_relative": 0.5, "largest_at_step": 2, "first_step_that_differs": 2},
            "weights": {"largest_relative": 0.25, "tensor": "fc.weight"},
        }
    ],
    "runs": [{"name": "ddp", "losses": [2.0, 1.0]}, {"name": "horovod", "losses": [2.0, 0.5]}],
}


def test_a_parity_certificate(tmp_path):
    (tmp_path / "certificate.json").write_text(json.dumps(PARITY))
    text = text_of(write_report([tmp_path]).read_text())
    assert "FAILED job.yaml: 2 steps on 2 ranks, seed 1, fp32" in text
    assert "ddp and horovod: the loss is beyond the tolerance from step 2 on" in text
    assert "ddp and horovod 1e-05 0.5 (step 2) 0.25 (fc.weight) 2 failed" in text


def test_a_certificate_of_losses_that_were_not_finite(tmp_path):
    """JSON has no infinity: the certificate says null."""
    (compared,) = PARITY["comparisons"]
    loss = {"largest_relative": None, "largest_at_step": 1, "first_step_that_differs": 1}
    runs = [{"name": name, "losses": [None, None]} for name in ("ddp", "horovod")]
    document = {**PARITY, "comparisons": [{**compared, "loss": loss}], "runs": runs}
    (tmp_path / "certificate.json").write_text(json.dumps(document))
    text = text_of(write_report([tmp_path]).read_text())
    assert "ddp and horovod 1e-05 not finite (step 1) 0.25 (fc.weight) 1 failed" in text


def test_what_cannot_be_shown_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "mnist")
    (tmp_path / "empty").mkdir()
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "metrics.jsonl").write_text("")
    (tmp_path / "ended").mkdir()
    (tmp_path / "ended" / "summary.json").write_text("{}")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "none.json").write_text('{"rows": [], "rounds": 5}')
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "network.json").write_text('{"rows": [')
    cases = {
        "rums": r"rums: no such file or folder; did you mean \S*runs\?",
        "runs": r"runs: is no run and holds no results .*; folders in it do\. Name them: hvdtrain report \S*runs/mnist",
        "empty": r"empty: is no run and holds no results \(none of metrics\.jsonl, network\.json",
        "started": r"started/metrics\.jsonl: is empty: no step was logged yet",
        "ended": r"ended: a run without metrics\.jsonl",
        "other.json": r"other\.json: is not a result of `hvdtrain bench network`",
        "none.json": r"none\.json: .*, or has no rows",
        "torn": r"torn/network\.json: is not JSON .*; was it cut short\?",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message):
            write_report([tmp_path / name])


def test_an_output_that_cannot_be_written(tmp_path):
    run = make_run(tmp_path / "a")
    with pytest.raises(UserError, match=r"cannot be written .*; choose another --output"):
        write_report([run], run / "metrics.jsonl" / "report.html")


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"need matplotlib: pip install 'hvdtrain\[plots\]'"):
        write_report([make_run(tmp_path / "a")])


def test_the_command(tmp_path):
    def report(*arguments):
        command = [sys.executable, "-m", "hvdtrain", "report", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    done = report(make_run(tmp_path / "a"), "--output", tmp_path / "r.html")
    assert (done.returncode, done.stdout) == (0, f"report: {tmp_path / 'r.html'}\n")
    assert (tmp_path / "r.html").stat().st_size > 10_000
    missing = report(tmp_path / "b")
    assert missing.returncode == 2
    assert missing.stderr.startswith(f"hvdtrain: error: {tmp_path / 'b'}: no such file or folder")
    assert report().returncode == 2
