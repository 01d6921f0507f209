"""The checksum finds every kind of damage."""

from __future__ import annotations

import hashlib
import zipfile

import pytest
import torch

from hvdtrain.checkpoint import CheckpointStore, load
from hvdtrain.checkpoint.checksum import damage
from hvdtrain.errors import CheckpointError

COMMENT_BYTES = 80


@pytest.fixture
def small(tmp_path, make_state):
    return CheckpointStore(tmp_path).save(make_state(1, optimizer={}, scheduler=None), step=1)


def test_the_comment_is_the_sha256_of_what_is_before_it(small):
    content = small.read_bytes()
    expected = b"hvdtrain-sha256:" + hashlib.sha256(content[:-COMMENT_BYTES]).hexdigest().encode()
    assert content[-COMMENT_BYTES:] == expected
    with zipfile.ZipFile(small) as archive:
        assert archive.comment == expected
        assert archive.testzip() is None


def test_any_flipped_byte_is_found(small):
    content = bytearray(small.read_bytes())
    mark = range(len(content) - COMMENT_BYTES, len(content) - 64)
    missed = []
    for place in range(len(content)):
        content[place] ^= 0x10
        small.write_bytes(content)
        if damage(small) is None:
            missed.append(place)
        content[place] ^= 0x10
    # In the mark itself nothing of the content is hurt; the file then counts as one without our checksum.
    assert set(missed) <= set(mark)
    small.write_bytes(content)
    assert damage(small) is None


def test_any_cut_is_found_or_harmless(small):
    content = small.read_bytes()
    expected = load(small)["model"]["weight"]
    for length in range(0, len(content), 7):
        small.write_bytes(content[:length])
        if length <= len(content) - COMMENT_BYTES - 22:
            assert damage(small) is not None, length
        elif damage(small) is None:  # a part of the comment alone is gone
            assert torch.equal(load(small)["model"]["weight"], expected)


def test_flipped_weights_that_torch_accepts_are_refused(tmp_path, make_state):
    path = tmp_path / "step-00000001.pt"
    for save in (lambda state: CheckpointStore(tmp_path).save(state, step=1), lambda state: torch.save(state, path)):
        save(make_state(1, model={"weight": torch.full((1000,), 1.5)}))
        content = path.read_bytes()
        path.write_bytes(content.replace(b"\0\0\xc0\x3f" * 500, b"\0\0\xc0\x40" + b"\0\0\xc0\x3f" * 499, 1))
        assert torch.load(path, weights_only=True)["model"]["weight"].max() == 6.0
        with pytest.raises(CheckpointError, match=r"step-00000001\.pt cannot be used: .*checksum"):
            load(path)


def test_text_is_no_checkpoint(tmp_path):
    (tmp_path / "x.pt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"not a file of torch\.save"):
        load(tmp_path / "x.pt")
