"""Progress: a real terminal (pty), and plain lines."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import re
import struct
import termios
import threading

import pytest

from hvdtrain.launch.world import World
from hvdtrain.metrics import Progress, set_up_logging


def run(progress):
    with progress:
        step = 0
        for epoch in range(2):
            progress.start_epoch(epoch)
            for _ in range(3):
                step += 1
                progress.step(step)
                progress.logged(loss=1 / step, samples_per_second=1234.5)
            with progress.evaluation(2) as done:
                done(1)
                done(2)
            progress.evaluated({"accuracy": 0.5})
            progress.end_epoch()


def test_plain_lines_are_few():
    stream = io.StringIO()
    run(Progress(total_steps=6, num_epochs=2, stream=stream, plain_every_s=1000))
    lines = stream.getvalue().splitlines()
    assert re.fullmatch(r"epoch 1/2  step 1/6  loss 1\.0000  1,23[45] samples/s  0:0\d left", lines[0])
    assert lines[1:] == [
        "epoch 1/2  step 3/6  evaluation: accuracy 0.5",
        "epoch 1/2  step 3/6  end of epoch  loss 0.3333  1,234 samples/s",
        "epoch 2/2  step 6/6  evaluation: accuracy 0.5",
        "epoch 2/2  step 6/6  end of epoch  loss 0.1667  1,234 samples/s",
    ]


def test_plain_lines_without_known_totals_and_of_a_slow_evaluation():
    stream = io.StringIO()
    run(Progress(stream=stream, plain_every_s=0))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "epoch 1  step 1  loss 1.0000  1,234 samples/s"
    assert lines[3:5] == ["epoch 1  step 3  evaluating 1/2", "epoch 1  step 3  evaluating 2/2"]
    assert len(lines) == 14


def test_nothing_on_other_ranks():
    stream = io.StringIO()
    run(Progress(enabled=False, total_steps=6, stream=stream, plain_every_s=0))
    assert stream.getvalue() == ""


def test_after_close_nothing_is_shown():
    stream = io.StringIO()
    progress = Progress(stream=stream)
    progress.close()
    progress.message("late")
    assert stream.getvalue() == ""


@pytest.fixture(params=[0, 90])
def terminal(request, monkeypatch):
    """A stream on a pty of 90 columns or of none (as in some containers), and what a person would have seen pass by."""
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = pty.openpty()
    if request.param:
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, request.param, 0, 0))
    seen = bytearray()

    def drain():
        while True:
            try:
                data = os.read(reader, 65536)
            except OSError:  # the other end is closed
                return
            seen.extend(data)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    stream = os.fdopen(writer, "w", encoding="utf-8")

    def text():
        stream.close()
        thread.join(20)
        os.close(reader)
        return seen.decode()

    return stream, text


def final_screen(text):
    """Lines as they stand in the end: `\\r` goes back and overwrites."""
    screen = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        screen.append(shown.rstrip())
    return screen


def test_a_bar_of_one_line_on_a_terminal(terminal):
    stream, text = terminal
    logger = logging.getLogger("hvdtrain")
    progress = Progress(total_steps=6, first_step=0, num_epochs=2, stream=stream)
    set_up_logging(World(), stream=stream)
    try:
        logger.info("a line of the log")
        run(progress)
    finally:
        logger.removeHandler(logger.handlers[-1])
    seen = text()
    assert re.search(r"epoch 1/2  step 0/6 \|", seen)
    assert re.search(r"epoch 1/2  step 3/6 \|█+ +\|  evaluating 0/2", seen)
    assert re.search(r"epoch 2/2  step 6/6 \|█+\|  loss 0\.1667  1,234 samples/s  00:00 left", seen)
    assert final_screen(seen) == [
        "hvdtrain: a line of the log",
        "epoch 1/2  step 3/6  evaluation: accuracy 0.5",
        "epoch 1/2  step 3/6  end of epoch  loss 0.3333  1,234 samples/s",
        "epoch 2/2  step 6/6  evaluation: accuracy 0.5",
        "epoch 2/2  step 6/6  end of epoch  loss 0.1667  1,234 samples/s",
        "",
    ]


def test_a_bar_of_a_run_without_known_end_that_was_resumed(terminal):
    stream, text = terminal
    with Progress(first_step=100, stream=stream) as progress:
        progress.start_epoch(4)
        progress.step(101)
        progress.logged(loss=0.5, samples_per_second=10.0)
        progress.start_epoch(5)
    assert re.search(r"epoch 6  step 101  loss 0\.5000  10 samples/s  00:00 so far", text())


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream, text = terminal
    run(Progress(total_steps=6, stream=stream, plain_every_s=1000))
    assert "\r" not in text().replace("\r\n", "\n")


def test_other_ranks_clear_the_line_of_the_bar(terminal):
    stream, text = terminal
    logger = set_up_logging(World(rank=1, size=2, local_rank=1, local_size=2), stream=stream)
    try:
        logger.warning("slow")
    finally:
        logger.removeHandler(logger.handlers[-1])
        logger.setLevel(logging.NOTSET)
    assert text() == "\r\x1b[K[rank 1] warning: slow\r\n"
