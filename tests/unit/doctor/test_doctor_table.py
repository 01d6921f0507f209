"""The table fits its width and is plain text; JSON says the same."""

import click

from hvdtrain.doctor.finding import absent, fault, ok, warn
from hvdtrain.doctor.table import MAX_WIDTH, as_json, render_row, summary

LONG = fault(
    "horovod",
    "does not load: ImportError: /very/long/path/" + "x" * 150 + "/mpi_lib_v2.so: undefined symbol: _ZN2at4_ops5zeros",
    "hvdtrain build-horovod --force " + "and so on " * 20,
)


def test_a_row_has_mark_subject_text_and_below_it_the_cure():
    assert render_row(ok("numpy", "2.1.0")) == "ok     numpy             2.1.0"
    assert render_row(warn("cpu", "1 core", "buy one")).splitlines() == [
        "warn   cpu               1 core",
        "                         -> buy one",
    ]
    assert render_row(absent("mpi", "none")).startswith("\N{EN DASH}      mpi  ")


def test_no_line_is_wider_than_asked_for():
    for width in (60, 80, MAX_WIDTH):
        lines = render_row(LONG, width=width).splitlines()
        assert max(map(len, lines)) <= width
        assert lines[0].startswith("FAULT  horovod")
        assert all(line.startswith(" " * 25) for line in lines[1:])


def test_colour_only_where_asked_for():
    assert "\x1b" not in render_row(LONG)
    assert click.unstyle(render_row(LONG, colour=True)) == render_row(LONG)
    assert render_row(LONG, colour=True).startswith("\x1b[31m")


def test_the_last_line_counts():
    assert summary([ok("a", ""), absent("b", "")]) == "no faults"
    assert summary([fault("a", "", ""), fault("b", "", ""), warn("c", "", "")]) == "2 faults: a, b; 1 warning: c"


def test_json():
    assert as_json([ok("numpy", "2.1.0"), warn("cpu", "1 core", "buy one")]) == {
        "ok": True,
        "findings": [
            {"status": "ok", "subject": "numpy", "found": "2.1.0", "cure": ""},
            {"status": "warn", "subject": "cpu", "found": "1 core", "cure": "buy one"},
        ],
    }
    assert as_json([LONG])["ok"] is False
