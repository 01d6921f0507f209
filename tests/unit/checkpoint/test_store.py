"""Writing, keeping and finding checkpoints."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path

import pytest
import torch

from hvdtrain.checkpoint import BestRule, CheckpointStore, load
from hvdtrain.errors import CheckpointError, TrainingFailed, UserError


def weights(path: Path) -> float:
    return float(load(path)["model"]["weight"][0, 0])


def test_a_file_has_the_promised_name_keys_and_opens_with_plain_torch(tmp_path, make_state):
    path = CheckpointStore(tmp_path / "checkpoints").save(make_state(7), step=7)
    assert path == tmp_path / "checkpoints" / "step-00000007.pt"
    content = torch.load(path, weights_only=True)
    assert list(content) == ["format", "model", "optimizer", "scheduler", "scaler", "progress", "rng", "config"]
    assert content["format"] == 1
    assert content["progress"] == {"epoch": 0, "step": 7, "samples_in_epoch": 56}
    assert torch.equal(content["model"]["weight"], torch.full((2, 3), 7.0))
    assert torch.load(path, weights_only=True, mmap=True)["model"]["weight"][1, 2] == 7.0


def test_a_file_has_the_permissions_that_the_umask_gives(tmp_path, make_state):
    old = os.umask(0o027)
    try:
        path = CheckpointStore(tmp_path).save(make_state(1), step=1)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_model_keys_are_saved_without_wrappers(tmp_path, make_state, prefix):
    model = {f"{prefix}{key}": value for key, value in make_state(1)["model"].items()}
    path = CheckpointStore(tmp_path).save(make_state(1, model=model), step=1)
    assert list(torch.load(path, weights_only=True)["model"]) == ["weight", "bias"]


def test_a_file_with_module_keys_loads(tmp_path, make_state):
    state = make_state(3)
    state["model"] = {f"module.{key}": value for key, value in state["model"].items()}
    torch.save(state, tmp_path / "step-00000003.pt")
    found = CheckpointStore(tmp_path).find("auto")
    assert found is not None
    assert found.step == 3
    assert list(found.state["model"]) == ["weight", "bias"]


def test_retention_keeps_the_newest(tmp_path, make_state):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        store.save(make_state(step), step=step)
    assert store.steps() == [3, 4]
    assert store.latest() == tmp_path / "step-00000004.pt"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003.pt", "step-00000004.pt"]


def test_keep_none_keeps_all_and_keep_0_is_refused(tmp_path, make_state):
    store = CheckpointStore(tmp_path, keep=None)
    for step in range(1, 6):
        store.save(make_state(step), step=step)
    assert store.steps() == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="keep is 0"):
        CheckpointStore(tmp_path, keep=0)


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 1)])
def test_the_best_outlives_retention_and_restarts(tmp_path, make_state, mode, best):
    for step, accuracy in ((1, 0.1), (2, 0.9), (3, 0.5), (4, math.nan), (5, 0.6)):
        store = CheckpointStore(tmp_path, keep=1, best=BestRule("accuracy", mode))  # a restart before each
        store.save(make_state(step), step=step, metrics={"accuracy": accuracy, "loss": 1.0})
    CheckpointStore(tmp_path, keep=1, best=BestRule("accuracy", mode)).save(make_state(6), step=6)
    store = CheckpointStore(tmp_path, keep=1, best=BestRule("accuracy", mode))
    assert store.steps() == [best, 6]
    assert store.best() == store.path_of(best)
    assert weights(store.best()) == best
    assert json.loads((tmp_path / "best.json").read_text())["best"] == best


def test_would_be_best(tmp_path, make_state):
    store = CheckpointStore(tmp_path, best=BestRule("accuracy"))
    assert store.would_be_best({"accuracy": 0.1})
    store.save(make_state(1), step=1, metrics={"accuracy": 0.5})
    assert store.would_be_best({"accuracy": 0.6})
    assert not store.would_be_best({"accuracy": 0.5})
    assert not store.would_be_best({"accuracy": math.nan})
    assert not CheckpointStore(tmp_path).would_be_best({"accuracy": 0.6})


def test_an_unknown_metric_names_those_that_there_are(tmp_path, make_state):
    store = CheckpointStore(tmp_path, best=BestRule("acuracy"))
    with pytest.raises(UserError, match="'acuracy', but the evaluation gives: accuracy, loss"):
        store.save(make_state(1), step=1, metrics={"loss": 1.0, "accuracy": 0.5})
    with pytest.raises(UserError, match="'highest': it must be max or min"):
        BestRule("accuracy", "highest")


def test_another_rule_or_a_damaged_record_starts_the_comparison_anew(tmp_path, make_state, caplog):
    CheckpointStore(tmp_path, best=BestRule("accuracy")).save(make_state(1), step=1, metrics={"accuracy": 0.5})
    store = CheckpointStore(tmp_path, best=BestRule("loss", "min"))
    assert store.best() is None
    assert "was kept for accuracy (max), now it is loss (min)" in caplog.text
    (tmp_path / "best.json").write_text("{")
    assert CheckpointStore(tmp_path, best=BestRule("accuracy")).best() is None
    assert "best.json cannot be read" in caplog.text


def test_a_value_without_its_checkpoint_does_not_count(tmp_path, make_state):
    """A process that died between the two writes."""
    store = CheckpointStore(tmp_path, best=BestRule("accuracy"))
    store.save(make_state(1), step=1, metrics={"accuracy": 0.5})
    store.save(make_state(2), step=2, metrics={"accuracy": 0.9})
    store.path_of(2).unlink()
    assert CheckpointStore(tmp_path, best=BestRule("accuracy")).best() == store.path_of(1)


def test_saving_before_later_checkpoints_deletes_them_once_it_is_complete(tmp_path, make_state, caplog):
    store = CheckpointStore(tmp_path, keep=3, best=BestRule("accuracy"))
    for step in (10, 20, 30):
        store.save(make_state(step), step=step, metrics={"accuracy": step / 100})
    found = CheckpointStore(tmp_path, keep=3, best=BestRule("accuracy")).find(store.path_of(10))
    assert found.step == 10
    assert "the later checkpoints (steps 20, 30) will be deleted" in caplog.text
    with pytest.raises(CheckpointError):
        store.save(make_state(15, rng=object()), step=15)
    assert store.steps() == [10, 20, 30]
    store.save(make_state(15), step=15)
    assert store.steps() == [10, 15]
    assert store.best() == store.path_of(10)
    # The best of all is out of the run, and still there.
    assert "step-00000030.pt was the best until now" in caplog.text
    assert [path.name for path in tmp_path.glob("*.abandoned")] == ["step-00000030.pt.abandoned"]
    assert weights(tmp_path / "step-00000030.pt.abandoned") == 30.0


def abandon(folder, make_state):
    """Checkpoints of steps 400 (0.90) and 800 (0.95), of which a run goes on from 400."""
    rule = BestRule("accuracy")
    before = CheckpointStore(folder, keep=1, best=rule)
    for step, accuracy in ((400, 0.9), (800, 0.95)):
        before.save(make_state(step), step=step, metrics={"accuracy": accuracy})
    # As keep: 3 would have it.
    CheckpointStore(folder / "other").save(make_state(400), step=400)
    (folder / "other" / "step-00000400.pt").rename(before.path_of(400))
    (folder / "best.json").write_text(
        json.dumps({"metric": "accuracy", "mode": "max", "best": 800, "values": {"400": 0.9, "800": 0.95}})
    )
    store = CheckpointStore(folder, keep=1, best=rule)
    assert store.steps() == [400, 800]
    assert store.find(store.path_of(400)).step == 400
    return store


def test_checkpoints_of_an_abandoned_run_do_not_compete_for_the_best(tmp_path, make_state):
    store = abandon(tmp_path, make_state)
    assert store.best() == store.path_of(800)
    assert not store.would_be_best({"accuracy": 0.9})
    assert store.would_be_best({"accuracy": 0.94})
    store.save(make_state(600), step=600, metrics={"accuracy": 0.94})
    store.save(make_state(1000), step=1000, metrics={"accuracy": 0.93})
    assert store.steps() == [600, 1000]
    assert store.best() == store.path_of(600)
    assert weights(tmp_path / "step-00000800.pt.abandoned") == 800.0
    assert CheckpointStore(tmp_path, keep=1, best=BestRule("accuracy")).find("auto").step == 1000


@pytest.mark.parametrize(("metrics", "best"), [({"accuracy": 0.91}, 800), (None, 400)])
def test_a_checkpoint_in_the_place_of_an_abandoned_one_has_its_own_value(tmp_path, make_state, metrics, best):
    store = abandon(tmp_path, make_state)
    assert store.would_be_best({"accuracy": 0.91})
    with pytest.raises(CheckpointError):
        store.save(make_state(800, rng=object()), step=800)
    assert not list(tmp_path.glob("*.abandoned"))
    new = make_state(800)
    new["model"]["weight"] = torch.full((2, 3), -1.0)
    store.save(new, step=800, metrics=metrics)
    assert (store.steps(), store.best()) == (sorted({best, 800}), store.path_of(best))
    assert weights(store.path_of(800)) == -1.0
    assert weights(tmp_path / "step-00000800.pt.abandoned") == 800.0
    assert CheckpointStore(tmp_path, keep=1, best=BestRule("accuracy")).best() == store.path_of(best)
    # Saved once more, with its evaluation: it competes with itself as little as it replaces itself.
    assert store.would_be_best({"accuracy": 0.92})
    store.save(new, step=800, metrics={"accuracy": 0.92})
    assert len(list(tmp_path.glob("*.abandoned"))) == 1
    assert not store.would_be_best({"accuracy": 0.92})


def test_a_write_that_fails_leaves_the_abandoned_ones_in_place(tmp_path, make_state, monkeypatch):
    store = abandon(tmp_path, make_state)

    def full(document, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hvdtrain.checkpoint.store.save_with_checksum", full)
    for step in (600, 800):
        with pytest.raises(TrainingFailed, match="No space left"):
            store.save(make_state(step), step=step)
        assert store.steps() == [400, 800]
        assert weights(store.path_of(800)) == 800.0


def test_the_same_step_again_replaces_the_file(tmp_path, make_state):
    store = CheckpointStore(tmp_path)
    store.save(make_state(1), step=1)
    store.save(make_state(1, scaler={"scale": 2.0}), step=1)
    assert store.steps() == [1]
    assert load(store.path_of(1))["scaler"] == {"scale": 2.0}


def test_resume_none(tmp_path, make_state):
    store = CheckpointStore(tmp_path)
    assert store.find("none") is None
    store.save(make_state(12), step=12)
    with pytest.raises(UserError, match=r"already holds checkpoints, the last of step 12.*--resume auto") as error:
        store.find("none")
    assert str(tmp_path) in str(error.value)
    assert error.value.exit_status == 2


def test_resume_auto_without_files_starts_afresh(tmp_path):
    assert CheckpointStore(tmp_path / "not there").find("auto") is None
    (tmp_path / "step-1.pt").touch()  # not a name of ours
    assert CheckpointStore(tmp_path).find("auto") is None


def test_resume_auto_falls_back_over_damaged_files_with_a_warning(tmp_path, make_state, caplog):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(make_state(step), step=step)
    whole = store.path_of(3).read_bytes()
    store.path_of(3).write_bytes(whole[: len(whole) // 2])
    store.path_of(2).write_bytes(b"")
    found = store.find("auto")
    assert found.step == 1
    assert found.path == store.path_of(1)
    assert len(found.skipped) == 2
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "step-00000003.pt cannot be used: the file is cut off" in warnings[0]
    assert "step-00000002.pt cannot be used: the file is empty" in warnings[1]
    assert warnings[2] == f"falling back to the checkpoint before: {store.path_of(1)}"


def test_resume_auto_with_nothing_readable_is_an_error(tmp_path, make_state):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(make_state(step), step=step)
        store.path_of(step).write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"(?s)none of the checkpoints.*00000002\.pt.*00000001\.pt") as error:
        store.find("auto")
    assert error.value.exit_status == 2


def test_resume_from_a_path(tmp_path, make_state):
    old, new = CheckpointStore(tmp_path / "old" / "checkpoints"), CheckpointStore(tmp_path / "new" / "checkpoints")
    for step in (4, 8):
        old.save(make_state(step), step=step)
    for path in (old.path_of(8), old.folder, tmp_path / "old"):
        assert new.find(path).step == 8
        assert new.find(str(path)).path == old.path_of(8)
    assert new.find(old.path_of(4)).step == 4
    assert old.find(tmp_path / "old").step == 8


def test_resume_from_a_path_that_is_missing_empty_or_damaged(tmp_path, make_state):
    store = CheckpointStore(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"nowhere\.pt: there is no such file"):
        store.find(tmp_path / "nowhere.pt")
    with pytest.raises(CheckpointError, match=r"there is no step-XXXXXXXX\.pt in"):
        store.find(tmp_path)
    store.save(make_state(1), step=1)
    path = store.save(make_state(2), step=2)
    path.write_bytes(path.read_bytes()[:-200])
    # A file that was named is not silently replaced by another one.
    with pytest.raises(CheckpointError, match=r"00000002\.pt cannot be used"):
        store.find(path)


def test_another_runs_checkpoints_do_not_mix_with_ours(tmp_path, make_state):
    old, new = CheckpointStore(tmp_path / "old"), CheckpointStore(tmp_path / "new")
    old.save(make_state(4), step=4)
    new.save(make_state(500), step=500)
    for path in (old.folder, old.path_of(4)):
        with pytest.raises(UserError, match="the last of step 500"):
            new.find(path)


def test_files_that_are_no_checkpoints_say_so(tmp_path, make_state):
    path = tmp_path / "step-00000001.pt"
    torch.save({"weight": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="is not an hvdtrain checkpoint: it has no 'format' key"):
        load(path)
    torch.save(make_state(1, format=2), path)
    with pytest.raises(CheckpointError, match="has format 2; this hvdtrain reads format 1"):
        load(path)
    state = make_state(1)
    del state["rng"]
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="lacks rng"):
        load(path)
    torch.save(make_state(1, config={"path": Path("/x")}), path)
    with pytest.raises(CheckpointError, match=r"torch\.load says"):
        load(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": 1}, "unknown: extra"),
        ({"format": 3}, "has format 3"),
        ({"progress": {"epoch": 0, "step": 1}}, "progress must have exactly"),
        ({"progress": {"epoch": 0, "step": 2, "samples_in_epoch": 0}}, "is of step 2, but is to be saved as step 1"),
        ({"progress": {"epoch": -1, "step": 1, "samples_in_epoch": 0}}, "must be an int from 0 up; it is -1"),
        ({"config": {"a": {"b": object()}}}, r"config\['a'\]\['b'\] is a builtins.object"),
    ],
)
def test_a_wrong_state_is_refused_before_anything_is_written(tmp_path, make_state, changes, message):
    store = CheckpointStore(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=message):
        store.save(make_state(1, **changes), step=1)
    assert not store.folder.exists()


def test_a_missing_key_is_refused(tmp_path, make_state):
    state = make_state(1)
    del state["scaler"]
    with pytest.raises(CheckpointError, match="missing: scaler"):
        CheckpointStore(tmp_path).save(state, step=1)


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UserError, match="is a file, but checkpoints need a folder"):
        CheckpointStore(tmp_path / "checkpoints")
