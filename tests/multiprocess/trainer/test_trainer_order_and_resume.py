"""Which samples come when; and a run that stopped anywhere goes on as if it had not."""

from __future__ import annotations

import pytest
from trainer_runs import Ran, job, run, stop_here, train_and_listen, train_here


def flat(rank):
    return [sample for batch in rank for sample in batch]


def epochs_of(ran, num_epochs):
    """What all ranks saw, by epoch, sorted; each rank sees the same number of samples in each."""
    found = []
    for epoch in range(num_epochs):
        mine = []
        for rank in ran.seen:
            samples = flat(rank)
            share = len(samples) // num_epochs
            mine += samples[epoch * share : (epoch + 1) * share]
        found.append(mine)
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_g_each_epoch_covers_all_once_in_another_order(pool2, tmp_path, num_workers):
    tree = job("Augmented", tmp_path / "a", shuffle=True, batch_size=2, epochs=3, num_workers=num_workers)
    ran = run(pool2, tree)
    epochs = epochs_of(ran, 3)
    orders = [[index for index, _, _ in epoch] for epoch in epochs]
    assert [sorted(order) for order in orders] == [[float(i) for i in range(8)]] * 3
    assert len({tuple(order) for order in orders}) == 3

    again = run(pool2, {**tree, "output": str(tmp_path / "b")})
    assert again.seen == ran.seen
    assert again.sha256 == ran.sha256

    # No random number is drawn twice: not in another epoch, on another rank or in another worker.
    drawn = [number for epoch in epochs for _, number, _ in epoch]
    assert len(set(drawn)) == 24
    workers = {worker for epoch in epochs for _, _, worker in epoch}
    assert workers == ({0.0, 1.0} if num_workers else {-1.0})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_order_depends_on_seed_and_epoch_alone(pool2, pools, tmp_path, num_workers):
    """The order over all ranks is the one that a single rank has."""
    tree = job("Augmented", tmp_path / "two", shuffle=True, num_workers=num_workers, epochs=2)
    two = run(pool2, tree)
    one = run(pools(pool2.kind, 1), {**tree, "output": str(tmp_path / "one")})
    dealt = [[sample[0] for sample in flat(rank)] for rank in two.seen]
    assert [x for pair in zip(*dealt, strict=True) for x in pair] == [sample[0] for sample in flat(one.seen[0])]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_k_the_rest_of_an_epoch_on_another_number_of_ranks(pool2, pools, tmp_path, before, after):
    values = [float(i) for i in range(40)]
    tree = job("Linear", tmp_path, task_options={"values": values}, shuffle=True, batch_size=4 // before)
    first = run(pools(pool2.kind, before), {**tree, "max_steps": 6})
    assert first.checkpoint()["progress"] == {"epoch": 0, "step": 6, "samples_in_epoch": 24}
    second = run(pools(pool2.kind, after), {**tree, "batch_size": 4 // after}, resume="auto")
    done, rest = flat([flat(r) for r in first.seen]), flat([flat(r) for r in second.seen])
    assert sorted([*(x for r in first.seen for x in flat(r)), *(x for r in second.seen for x in flat(r))]) == values
    assert (sum(len(flat(r)) for r in first.seen), sum(len(flat(r)) for r in second.seen)) == (24, 16)
    assert second.summary["epochs"] == 1
    assert not set(map(str, done)) & set(map(str, rest))


@pytest.mark.parametrize(
    ("before", "after", "total", "rates"),
    [
        # 16 samples: 8 steps an epoch on two ranks, 16 on one; linear to zero over 2 epochs, changed after the first.
        (2, 1, 24, [0.5 - i / 32 for i in range(16)]),
        (1, 2, 24, [0.5 - i / 16 for i in range(8)]),
    ],
)
def test_a_schedule_goes_on_with_another_number_of_ranks(pools, tmp_path, before, after, total, rates):
    """Where it was, to zero at the new end."""
    keys = {"optimizer": {"name": "SGD", "lr": 1.0}, "lr": {"schedule": "linear", "scaling": "linear", "base_batch": 1}}
    tree = job("Linear", tmp_path, task_options={"values": [1.0] * 16}, epochs=2, **keys)
    run(pools("ddp", before), {**tree, "max_steps": 16 // before})
    (messages, *_) = pools("ddp", after).run(train_and_listen, {**tree, "max_steps": None}, "auto")
    ran = Ran(0, tmp_path, [])
    assert ran.summary["steps"] == total
    # The base rate stays the one that was scaled for the ranks of before.
    found = [line["lr"] for line in ran.metrics][16 // before :]
    assert found == pytest.approx([before * rate for rate in rates], abs=1e-9)
    assert any(
        f"learning rate {before}, {before / 2:g} in step {16 // before + 1}; {total} steps" in m for m in messages
    )
    warned = (
        f"stay those of the checkpoint: {before}, where this job on {after} rank(s) asks for {after}; to change them"
    )
    assert any(warned in message for message in messages)


def test_a_changed_schedule_is_told_and_starts_where_the_run_is(pools, tmp_path):
    pool = pools("ddp", 2)
    tree = job("Linear", tmp_path, task_options={"values": [1.0] * 16}, max_steps=8)
    run(pool, {**tree, "max_steps": 4})
    changed = {**tree, "lr": {"schedule": "linear"}, "max_steps": 8}
    (messages, others) = pool.run(train_and_listen, {**changed, "epochs": None, "max_steps": 8}, "auto")
    assert [line["lr"] for line in Ran(0, tmp_path, []).metrics] == pytest.approx(
        [0.1] * 4 + [0.05, 0.0375, 0.025, 0.0125]
    )
    assert any(
        "those of this job from step 5 on, as if they had been from the start: the learning rate is 0.05 there, and "
        "would have been 0.1" in message
        for message in messages
    )
    assert others == []
    run(pool, {**tree, "epochs": None, "max_steps": 10}, resume="auto")
    assert [line["lr"] for line in Ran(0, tmp_path, []).metrics][8:] == [0.1, 0.1]


MOMENTUM = {"name": "SGD", "lr": 0.05, "momentum": 0.9}
ADAM = {"name": "Adam", "lr": 0.01}


@pytest.mark.parametrize(
    ("kind", "num_workers", "optimizer", "accumulate"),
    [
        ("map", 0, MOMENTUM, 1),
        ("map", 2, ADAM, 2),
        ("stream", 0, MOMENTUM, 2),
        ("stream", 2, MOMENTUM, 1),
        ("state", 0, ADAM, 1),
        ("finished", 0, MOMENTUM, 2),
    ],
)
def test_a_resume_in_mid_epoch_is_exact(pool2, tmp_path, kind, num_workers, optimizer, accumulate):
    """Dropout, augmentation, batch norm, optimizer state, workers: all as if the run had never stopped."""
    tree = job(
        "Noisy",
        tmp_path / "whole",
        task_options={"kind": kind, "num_samples": 40},
        epochs=2,
        batch_size=None if kind == "finished" else 4,
        accumulate=accumulate,
        shuffle=True,
        num_workers=num_workers,
        optimizer=optimizer,
        lr={"warmup_steps": 3},
        compression="fp16",
    )
    whole = run(pool2, tree)
    per_epoch = whole.summary["steps"] // 2
    assert per_epoch >= 3
    stop_after = per_epoch - 1
    parts = {**tree, "output": str(tmp_path / "parts")}
    first = run(pool2, {**parts, "max_steps": stop_after})
    assert first.checkpoint()["progress"]["samples_in_epoch"] > 0
    # And once more, in the second epoch.
    second = run(pool2, {**parts, "max_steps": stop_after + 3}, resume="auto")
    third = run(pool2, parts, resume="auto")
    assert [a + b + c for a, b, c in zip(first.seen, second.seen, third.seen, strict=True)] == whole.seen
    assert third.sha256 == whole.sha256
    assert [line["loss"] for line in third.metrics] == [line["loss"] for line in whole.metrics]
    assert third.summary["eval"] == whole.summary["eval"]


def test_a_resume_under_the_other_backend_is_exact(pools, tmp_path):
    tree = job("Noisy", tmp_path / "whole", batch_size=4, epochs=2, optimizer=MOMENTUM)
    whole = run(pools("ddp", 2), tree)
    parts = {**tree, "output": str(tmp_path / "parts")}
    run(pools("ddp", 2), {**parts, "max_steps": 3})
    run(pools("horovod", 2), {**parts, "max_steps": 7}, resume="auto")
    last = run(pools("ddp", 2), parts, resume="auto")
    assert last.sha256 == whole.sha256
    assert [line["loss"] for line in last.metrics] == [line["loss"] for line in whole.metrics]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_stop_request_on_one_rank_stops_all_at_one_step(pool2, tmp_path, rank, kind):
    options = {"kind": kind, "num_samples": 400}
    tree = job("Noisy", tmp_path / "whole", task_options=options, batch_size=2, optimizer=MOMENTUM, log_every_steps=50)
    whole = run(pool2, tree)
    assert whole.summary["steps"] == 100
    parts = {**tree, "output": str(tmp_path / "parts")}
    stopping = {
        **parts,
        "task": tree["task"].replace("Noisy", "StopAt"),
        "task_options": {**options, "rank": rank, "call": 5},
    }
    outcomes = pool2.run(stop_here, stopping)
    assert [status for status, _ in outcomes] == [75, 75]
    stopped = Ran(75, tmp_path / "parts", [seen for _, seen in outcomes])
    assert stopped.summary["status"] == "stopped"
    assert stopped.summary["ranks_agree"] is True
    step = stopped.summary["steps"]
    assert 5 <= step < 100
    assert [len(seen) for seen in stopped.seen] == [step, step]
    assert stopped.checkpoints() == [f"step-{step:08d}.pt"]
    assert stopped.summary["eval"] == {}

    rest = run(pool2, parts, resume="auto")
    assert rest.summary["status"] == "done"
    assert [a + b for a, b in zip(stopped.seen, rest.seen, strict=True)] == whole.seen
    assert rest.sha256 == whole.sha256


def test_a_resume_of_a_finished_run_changes_nothing(pool2, tmp_path):
    tree = job("Noisy", tmp_path, batch_size=4)
    ran = run(pool2, tree)
    before = (ran.sha256, ran.checkpoints(), ran.metrics, ran.evaluations, ran.summary["eval"])
    again = run(pool2, tree, resume="auto")
    assert again.seen == [[], []]
    assert (again.sha256, again.checkpoints(), again.metrics, again.evaluations, again.summary["eval"]) == before


@pytest.mark.parametrize(("key", "value", "shown"), [("seed", 2, "seed: 1 -> 2"), ("shuffle", True, "false -> true")])
def test_another_order_of_the_data_cannot_be_resumed(pool2, tmp_path, key, value, shown):
    tree = job("Linear", tmp_path, task_options={"values": [1.0] * 8})
    run(pool2, {**tree, "max_steps": 2})
    for outcome in pool2.run_all(train_here, {**tree, key: value}, "auto"):
        assert outcome.kind == "CheckpointError"
        assert shown in outcome.text


def test_none_refuses_a_folder_with_checkpoints_on_every_rank(pool2, tmp_path):
    tree = job("Linear", tmp_path, task_options={"values": [1.0] * 8})
    run(pool2, {**tree, "max_steps": 2})
    for outcome in pool2.run_all(train_here, tree, "none"):
        assert outcome.kind == "UserError"
        assert "step 2" in outcome.text
        assert "--resume auto" in outcome.text


STREAMS = {"values": [[float(i) for i in range(10)], [float(i) for i in range(10, 20)]]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_workers": 1}, "saved in mid-epoch by 0 worker(s) each (num_workers) and this job has 1"),
        ({"batch_size": 2}, "saved in mid-epoch by 1 samples in a microbatch (batch_size) and this job has 2"),
    ],
)
def test_a_stream_without_state_is_resumed_in_the_same_way_only(pool2, tmp_path, change, said):
    tree = job("Ranks", tmp_path, task_options=STREAMS)
    run(pool2, {**tree, "max_steps": 4})
    for outcome in pool2.run_all(train_here, {**tree, **change}, "auto"):
        assert outcome.kind == "CheckpointError"
        assert said in outcome.text


def test_a_stream_without_state_refuses_another_number_of_ranks(pool2, pools, tmp_path):
    tree = job("Ranks", tmp_path, task_options=STREAMS)
    run(pool2, {**tree, "max_steps": 4})
    (outcome,) = pools(pool2.kind, 1).run_all(train_here, tree, "auto")
    assert outcome.kind == "CheckpointError"
    assert "saved in mid-epoch by 2 rank(s) and this job has 1" in outcome.text
    assert "state_dict" in outcome.text


def test_a_stream_may_change_its_number_of_ranks_at_the_end_of_an_epoch(pool2, pools, tmp_path):
    tree = job("Ranks", tmp_path, task_options=STREAMS)
    run(pool2, tree)
    ran = run(pools(pool2.kind, 1), {**tree, "epochs": 2}, resume="auto")
    assert ran.seen == [[[float(i)] for i in range(10)]]
    assert ran.summary["steps"] == 20


def test_a_stream_with_state_goes_on_with_another_number_of_ranks(pool2, pools, tmp_path):
    values = [float(i) for i in range(20)]
    tree = job("Resumable", tmp_path, task_options={"values": values})
    first = run(pool2, {**tree, "max_steps": 4})
    second = run(pools(pool2.kind, 1), tree, resume="auto")
    assert sorted(x for r in first.seen for x in flat(r)) == values[:8]
    assert flat(second.seen[0]) == values[8:]


def test_a_map_dataset_of_another_length_cannot_be_resumed_in_mid_epoch(pool2, tmp_path):
    tree = job("Linear", tmp_path, task_options={"values": [1.0] * 8})
    run(pool2, {**tree, "max_steps": 2})
    changed = {**tree, "task_options": {"values": [1.0] * 9}}
    for outcome in pool2.run_all(train_here, changed, "auto"):
        assert outcome.kind == "CheckpointError"
        assert "8 samples, and train_dataset() has 9 now" in outcome.text


def test_a_rest_that_makes_no_step_ends_the_epoch(pool2, pools, tmp_path):
    """One rank did 7 of 8 samples; two ranks with `stop` can do nothing with the last one."""
    tree = job("Linear", tmp_path, task_options={"values": [1.0] * 8}, uneven_data="stop")
    run(pools(pool2.kind, 1), {**tree, "max_steps": 7})
    ran = run(pool2, {**tree, "epochs": 2}, resume="auto")
    assert ran.summary["epochs"] == 2
    assert ran.summary["steps"] == 7 + 4


def test_a_checkpoint_of_another_model_is_an_error_on_every_rank(pool2, tmp_path):
    run(pool2, job("Linear", tmp_path, task_options={"values": [1.0] * 4}))
    tree = job("Linear", tmp_path, task_options={"values": [1.0] * 4, "size": 2}, epochs=2)
    for outcome in pool2.run_all(train_here, tree, "auto"):
        assert outcome.kind == "CheckpointError"
        assert "does not fit this task" in outcome.text


def test_tensorboard_has_no_step_twice_after_a_resume(pools, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pool = pools("ddp", 2)
    tree = job("Noisy", tmp_path, batch_size=4, checkpoint={"every_steps": 3, "keep": None})
    run(pool, {**tree, "max_steps": 4})
    (tmp_path / "checkpoints" / "step-00000004.pt").unlink()
    ran = run(pool, tree, resume="auto")
    assert ran.summary["steps"] == 5
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in ran.metrics] == [1, 2, 3, 4, 5]
    assert [event.step for event in events.Scalars("eval/loss")] == [5]
    assert events.Scalars("train/loss")[3].value == pytest.approx(ran.metrics[3]["loss"], rel=1e-6)


def test_j_a_file_with_wrapped_names_is_resumed(pool2, tmp_path):
    from hvdtrain.checkpoint.checksum import save_with_checksum

    tree = job("Linear", tmp_path, task_options={"values": [1.0] * 8})
    state = run(pool2, {**tree, "max_steps": 2}).checkpoint()
    assert set(state) == {"format", "model", "optimizer", "scheduler", "scaler", "progress", "rng", "config"}
    assert list(state["model"]) == ["w"]
    state["model"] = {"module._orig_mod.w": state["model"]["w"]}
    with (tmp_path / "checkpoints" / "step-00000002.pt").open("wb") as file:
        save_with_checksum(state, file)
    assert run(pool2, tree, resume="auto").w == pytest.approx([-0.4], rel=1e-6)


def test_a_resume_that_is_refused_leaves_the_folder_as_it_was(pool2, tmp_path):
    tree = job("Linear", tmp_path, task_options={"values": [1.0] * 8}, max_steps=2)
    run(pool2, tree)
    kept = {name: (tmp_path / name).read_bytes() for name in ("config.yaml", "metrics.jsonl")}
    checkpoints = {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}
    for outcome in pool2.run_all(train_here, {**tree, "seed": 7}, "auto"):
        assert outcome.kind == "CheckpointError"
        assert "seed" in outcome.text
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()} == checkpoints
