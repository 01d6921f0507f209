"""The log."""

from __future__ import annotations

import io
import logging

import pytest

from hvdtrain.launch.world import World
from hvdtrain.metrics import set_up_logging


@pytest.fixture(autouse=True)
def restored():
    logger = logging.getLogger("hvdtrain")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before
    logger.manager._clear_cache()


def said(world, **options):
    stream = io.StringIO()
    set_up_logging(world, stream=stream, **options)
    logger = logging.getLogger("hvdtrain.somewhere")
    logger.debug("debug")
    logger.info("hello %d", 1)
    logger.warning("two\nlines")
    return stream.getvalue()


def test_rank_0_tells_and_others_only_warn():
    world = World(rank=0, size=2, local_size=2)
    assert said(world) == "[rank 0] hello 1\n[rank 0] warning: two\n[rank 0] lines\n"
    other = World(rank=1, size=2, local_rank=1, local_size=2)
    assert said(other) == "[rank 1] warning: two\n[rank 1] lines\n"


def test_the_host_is_named_where_there_are_several():
    world = World(rank=1, size=2, node_rank=1, num_nodes=2)
    assert said(world, host="node-b") == "[rank 1 on node-b] warning: two\n[rank 1 on node-b] lines\n"
    assert said(World(), host="node-b").splitlines()[0] == "hvdtrain: hello 1"


def test_a_second_call_replaces_the_first_and_root_stays():
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    first = io.StringIO()
    set_up_logging(World(), stream=first)
    assert said(World(), level=logging.DEBUG).startswith("hvdtrain: debug\n")
    assert first.getvalue() == ""
    assert (list(root.handlers), root.level) == before


def test_standard_error_is_looked_up_when_something_is_said(capsys):
    set_up_logging(World())
    logging.getLogger("hvdtrain.x").info("seen")
    assert capsys.readouterr().err == "hvdtrain: seen\n"
