"""Uneven data, dynamic batches, weights, limits, evaluation and what is kept of it."""

from __future__ import annotations

import json

import pytest
from trainer_runs import Ran, job, run, train_here

FIFTEEN = [float(i) for i in range(15)]


@pytest.mark.parametrize(("uneven", "num_steps"), [("fill", 8), ("stop", 7)])
def test_an_uneven_map_dataset(pool2, tmp_path, uneven, num_steps):
    ran = run(pool2, job("Linear", tmp_path, task_options={"values": FIFTEEN}, uneven_data=uneven))
    assert ran.summary["steps"] == num_steps
    # Each step's gradient is the mean of the samples that are there: 0.5, 2.5, ..., 12.5 and 14 alone.
    assert [line["grad_norm"] for line in ran.metrics] == [*(2 * i + 0.5 for i in range(7)), 14.0][:num_steps]
    assert sorted(ran.samples()) == FIFTEEN[: 2 * num_steps]


def test_an_uneven_map_dataset_in_larger_groups(pool3, tmp_path):
    """10 samples on 3 ranks, 2 microbatches of 1: shares of 4, 3, 3 give groups of 2+2+2 and 2+1+1."""
    values = [float(i) for i in range(10)]
    ran = run(pool3, job("Linear", tmp_path, task_options={"values": values}, accumulate=2))
    assert [line["grad_norm"] for line in ran.metrics] == pytest.approx([sum(range(6)) / 6, 30 / 4], rel=1e-6)
    assert sorted(ran.samples()) == values


def test_fewer_samples_than_ranks(pool3, tmp_path):
    ran = run(pool3, job("Linear", tmp_path, task_options={"values": [5.0], "held_out": [3.0, 4.0]}, epochs=2))
    assert [line["grad_norm"] for line in ran.metrics] == [5.0, 5.0]
    assert [len(seen) for seen in ran.seen] == [2, 0, 0]
    assert ran.summary["eval"]["mean"] == 3.5


def test_fewer_samples_than_ranks_with_stop_is_an_error(pool3, tmp_path):
    tree = job("Linear", tmp_path, task_options={"values": [5.0]}, uneven_data="stop")
    for outcome in pool3.run_all(train_here, tree):
        assert outcome.kind == "TrainingFailed"
        assert "epoch 0 had no step: with uneven_data: stop a rank without a single sample ends it" in outcome.text


def test_streams_of_which_one_is_empty(pool3, tmp_path):
    values = [[1.0, 1.0], [], [4.0]]
    ran = run(pool3, job("Ranks", tmp_path, task_options={"values": values}, epochs=2))
    assert [line["grad_norm"] for line in ran.metrics] == [2.5, 1.0] * 2


def test_empty_datasets(pool2, tmp_path):
    for outcome in pool2.run_all(train_here, job("Linear", tmp_path / "map")):
        assert outcome.kind == "UserError"
        assert outcome.text == "train_dataset() is empty: there is nothing to train on"
    for outcome in pool2.run_all(train_here, job("Ranks", tmp_path / "stream", task_options={"values": [[], []]})):
        assert outcome.kind == "TrainingFailed"
        assert "epoch 0 had no step: no rank's dataset yielded a sample" in outcome.text


def test_map_datasets_that_differ_between_ranks(pool2, tmp_path):
    tree = job("RanksMap", tmp_path, task_options={"values": [[1.0], [1.0, 2.0]]})
    for outcome in pool2.run_all(train_here, tree):
        assert outcome.kind == "ContractError"
        assert "differs between ranks (rank 0: 1, rank 1: 2)" in outcome.text


def test_ranks_that_read_the_same_stream_are_told(pool2, tmp_path):
    def work(backend, tree):
        import logging

        messages = []

        class Keep(logging.Handler):
            def emit(self, record):
                messages.append(record.getMessage())

        keep = Keep()
        logging.getLogger("hvdtrain.data.feed").addHandler(keep)
        try:
            train_here(backend, tree)
        finally:
            logging.getLogger("hvdtrain.data.feed").removeHandler(keep)
        return messages

    same = pool2.run(work, job("Ranks", tmp_path / "a", task_options={"values": [[1.0, 2.0]] * 2}, epochs=2))
    assert [len(messages) for messages in same] == [1, 0]
    assert same[0][0].startswith("all 2 ranks read the same first microbatch.")
    other = pool2.run(work, job("Ranks", tmp_path / "b", task_options={"values": [[1.0, 2.0], [2.0, 1.0]]}))
    assert other == [[], []]


def test_dynamic_batches_of_a_map_dataset(pool2, tmp_path):
    """Each item is a microbatch, weighed by its samples: (1 + 2 + 3 + 9) / 4, then 4 alone."""
    values = [[1.0, 2.0, 3.0], [9.0], [4.0]]
    ran = run(pool2, job("Dynamic", tmp_path, task_options={"values": values}, batch_size=None))
    assert [line["grad_norm"] for line in ran.metrics] == [3.75, 4.0]
    assert ran.seen == [[[1.0, 2.0, 3.0], [4.0]], [[9.0]]]


def test_dynamic_batches_of_a_stream(pool2, tmp_path):
    values = [[[1.0, 2.0, 3.0], [5.0]], [[9.0]]]
    ran = run(pool2, job("DynamicRanks", tmp_path, task_options={"values": values}, batch_size=None))
    assert [line["grad_norm"] for line in ran.metrics] == [3.75, 5.0]
    accumulated = {"batch_size": None, "accumulate": 2}
    ran = run(pool2, job("DynamicRanks", tmp_path / "2", task_options={"values": values}, **accumulated))
    assert [line["grad_norm"] for line in ran.metrics] == [4.0]


def test_weights_are_the_tasks(pool2, tmp_path):
    """Loss x_i * w with weight x_i: sum x^2 / sum x over the ranks of each step."""
    values = [1.0, 3.0, 8192.0, 4096.0]
    ran = run(pool2, job("Weighted", tmp_path, task_options={"values": values}))
    expected = [(1 + 9) / 4, (8192**2 + 4096**2) / (8192 + 4096)]
    assert [line["grad_norm"] for line in ran.metrics] == pytest.approx(expected, rel=1e-6)
    # The logged values are weighted in the same way.
    assert [line["first"] for line in ran.metrics] == pytest.approx(expected, rel=1e-6)


def test_a_step_without_weight_is_skipped(pool2, tmp_path):
    ran = run(pool2, job("Weighted", tmp_path, task_options={"values": [0.0, 0.0, 1.0, 0.0, 2.0, 2.0]}))
    assert ran.summary["skipped_steps"] == 1
    assert ran.summary["steps"] == 3
    assert ran.w == pytest.approx([-0.1 * (1 + 2)], rel=1e-6)
    assert ran.metrics[0]["loss"] is None


def test_weights_of_zero_alone_end_the_job(pool2, tmp_path):
    for outcome in pool2.run_all(train_here, job("Weighted", tmp_path, task_options={"values": [0.0] * 120})):
        assert outcome.kind == "TrainingFailed"
        assert "every microbatch of every rank had the weight 0" in outcome.text


@pytest.mark.parametrize(
    ("limits", "steps", "epochs"),
    [
        ({"epochs": 2, "max_steps": None}, 8, 2),
        ({"epochs": None, "max_steps": 6}, 6, 1),
        ({"epochs": 2, "max_steps": 6}, 6, 1),
        ({"epochs": 1, "max_steps": 6}, 4, 1),
        ({"epochs": None, "max_steps": 8}, 8, 2),
    ],
)
def test_the_first_limit_ends_the_run(pool2, tmp_path, limits, steps, epochs):
    options = {"values": FIFTEEN[:8], "held_out": FIFTEEN[:3]}
    ran = run(pool2, job("Linear", tmp_path, task_options=options, eval={"every_epochs": None}, **limits))
    assert (ran.summary["steps"], ran.summary["epochs"]) == (steps, epochs)
    # Every normal end evaluates and saves.
    assert [line["step"] for line in ran.evaluations] == [steps]
    assert ran.checkpoints() == [f"step-{steps:08d}.pt"]


def seven(pool, tmp_path, batch_size):
    options = {"values": [1.0] * 6, "held_out": [float(i) for i in range(1, 8)]}
    ran = run(pool, job("Linear", tmp_path, task_options=options, batch_size=batch_size))
    assert ran.summary["eval"]["mean"] == 4.0
    assert ran.evaluations[-1]["eval"] == ran.summary["eval"]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_evaluation_counts_each_of_seven_samples_once_on_two_ranks(pool2, tmp_path, batch_size):
    seven(pool2, tmp_path, batch_size)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_evaluation_counts_each_of_seven_samples_once_on_three_ranks(pool3, tmp_path, batch_size):
    seven(pool3, tmp_path, batch_size)


@pytest.mark.parametrize(("every", "steps"), [(1, [2, 4, 6]), (2, [4, 6]), (None, [6])])
def test_when_to_evaluate(pool2, tmp_path, every, steps):
    options = {"values": [1.0] * 4, "held_out": [1.0]}
    ran = run(pool2, job("Linear", tmp_path, task_options=options, epochs=3, eval={"every_epochs": every}))
    assert [line["step"] for line in ran.evaluations] == steps
    # The metric sees the weights of that moment: -0.1 a step.
    assert [line["eval"]["w"] for line in ran.evaluations] == pytest.approx([-0.1 * step for step in steps], rel=1e-5)


# Gradients of 1, 1, -1, -1, ...: w goes down to -0.2 after 2 steps and back up to 0 after 4, then down again.
SWING = {"values": [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0], "held_out": [1.0]}


@pytest.mark.parametrize(
    ("mode", "epochs", "kept"),
    [
        # One epoch is 4 steps and ends at 0 again: the first evaluation stays the best.
        ("min", 3, ["step-00000004.pt", "step-00000012.pt"]),
        ("max", 3, ["step-00000004.pt", "step-00000012.pt"]),
    ],
)
def test_the_best_checkpoint_stays_beside_the_newest(pool2, tmp_path, mode, epochs, kept):
    tree = job(
        "Linear",
        tmp_path,
        task_options=SWING,
        epochs=epochs,
        optimizer={"name": "SGD", "lr": 0.125},
        checkpoint={"every_steps": None, "keep": 1, "best": {"metric": "w", "mode": mode}},
    )
    assert run(pool2, tree).checkpoints() == kept


def test_a_checkpoint_is_saved_when_the_evaluation_improves(pool2, tmp_path):
    """w falls in every epoch: each one is the best by `min`, only the first by `max`."""
    for mode, kept in [("min", [2, 4, 6]), ("max", [2, 6])]:
        tree = job(
            "Linear",
            tmp_path / mode,
            task_options={"values": [1.0] * 4, "held_out": [1.0]},
            epochs=3,
            checkpoint={"every_steps": None, "keep": None, "best": {"metric": "w", "mode": mode}},
        )
        assert run(pool2, tree).checkpoints() == [f"step-{step:08d}.pt" for step in kept]


def test_the_last_evaluation_competes_for_the_best_too(pool2, tmp_path):
    """The last step is saved by every_steps before the final evaluation, which must not lose its place by that."""
    import json

    tree = job(
        "Linear",
        tmp_path,
        task_options={"values": [1.0] * 4, "held_out": [1.0]},
        eval={"every_epochs": None},
        checkpoint={"every_steps": 1, "keep": 1, "best": {"metric": "w", "mode": "min"}},
    )
    run(pool2, tree)
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["best"] == 2


def test_a_best_metric_that_does_not_exist(pool2, tmp_path):
    tree = job(
        "Linear",
        tmp_path,
        task_options={"values": [1.0] * 4, "held_out": [1.0]},
        checkpoint={"best": {"metric": "acuracy", "mode": "max"}},
    )
    for outcome in pool2.run_all(train_here, tree):
        assert outcome.kind == "UserError"
        assert outcome.text.endswith("is 'acuracy', but the evaluation gives: mean, w")


def test_best_without_an_evaluation(pool2, tmp_path):
    tree = job("Linear", tmp_path, task_options={"values": [1.0]}, checkpoint={"best": {"metric": "w", "mode": "max"}})
    for outcome in pool2.run_all(train_here, tree):
        assert outcome.kind == "ConfigError"
        assert "checkpoint.best" in outcome.text


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("number", "ContractError", "metrics() returned 1.0"),
        ("bare", "ContractError", "return {name: (total, count)}"),
        ("vector", "ContractError", "return {name: (total, count)}"),
        ("names differ", "ContractError", "use the same names everywhere"),
        ("no count", "ContractError", "the count of 'accuracy' is 0 over all ranks"),
        ("empty", "ContractError", "is eval_dataset() empty?"),
        ("no dataset", "UserError", "eval_dataset() returned a int"),
    ],
)
def test_wrong_metrics(pool2, tmp_path, kind, error, said):
    for outcome in pool2.run_all(train_here, job("WrongMetrics", tmp_path, task_options={"kind": kind})):
        assert outcome.kind == error
        assert said in outcome.text


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("none", "loss() returned NoneType; return a tensor, (tensor, weight) or (tensor, weight, {name: value})"),
        ("float", "loss() returned float"),
        ("list", "loss() returned list"),
        ("long tuple", "loss() returned a tuple of (Tensor, int, dict, int)"),
        ("vector", "a tensor of shape (2,); return one number"),
        ("detached", "was it detached"),
        ("weight none", "a NoneType as the weight"),
        ("weight text", "a str as the weight"),
        ("weight negative", "the weight -1.0"),
        ("weight nan", "the weight nan"),
        ("values list", "a list as the values to log"),
        ("value text", "a str as the value 'accuracy'"),
        ("value vector", "a Tensor as the value 'accuracy'"),
        ("weight on one rank", "loss() returned a weight on 1 of 2 ranks with data"),
    ],
)
def test_wrong_losses(pool2, tmp_path, kind, said):
    for outcome in pool2.run_all(train_here, job("WrongLoss", tmp_path, task_options={"kind": kind})):
        assert outcome.kind in ("ContractError", "CollectiveError")
        assert said in outcome.text


def test_a_weight_that_comes_and_goes(pool2, tmp_path):
    tree = job("WrongLoss", tmp_path, task_options={"kind": "weight sometimes"})
    for outcome in pool2.run_all(train_here, tree):
        assert outcome.text.startswith("loss() returned no weight in step 2 and did the opposite before")


def test_own_optimizer_scheduler_and_collate(pool2, tmp_path):
    ran = run(pool2, job("OwnEverything", tmp_path, task_options={"values": [1.0] * 4}))
    assert ran.w == pytest.approx([-(2.0 * 1.0 + 2.0 * 0.1)], rel=1e-6)
    assert [line["lr"] for line in ran.metrics] == pytest.approx([1.0, 0.1])


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 4, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0, [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ("linear", 4, [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", 4, [0.25, 0.5, 0.75, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_learning_rates_of_a_schedule(pool2, tmp_path, schedule, warmup, expected):
    lr = {"schedule": schedule, "warmup_steps": warmup}
    tree = job("Linear", tmp_path, task_options={"values": [1.0] * 16}, lr=lr, optimizer={"name": "SGD", "lr": 1.0})
    assert [line["lr"] for line in run(pool2, tree).metrics] == pytest.approx(expected, rel=1e-6)


def test_a_falling_schedule_without_an_end(pool2, tmp_path):
    tree = job("Ranks", tmp_path, task_options={"values": [[1.0], [2.0]]}, lr={"schedule": "cosine"})
    for outcome in pool2.run_all(train_here, tree):
        assert outcome.kind == "ConfigError"
        assert "only max_steps tells it" in outcome.text


def test_reading_ahead_leaves_the_random_numbers_of_training_alone(pool2, tmp_path):
    """A stream that draws random numbers and one that does not: the same dropout."""

    def work(backend, tree):
        import torch

        train_here(backend, tree)
        return torch.rand(3).tolist()

    tree = job("Ranks", tmp_path / "a", task_options={"values": [[1.0] * 6] * 2})
    quiet = pool2.run(work, tree)
    noisy = pool2.run(work, {**tree, "task": tree["task"] + "Noise", "output": str(tmp_path / "b")})
    assert noisy == quiet
    assert quiet[0] != quiet[1]


def test_a_steady_step_sends_few_control_messages(pool2, tmp_path):
    def work(backend, tree):
        calls = []
        start_sum = backend.start_sum
        backend.start_sum = lambda tensor, name: calls.append(name) or start_sum(tensor, name)
        try:
            train_here(backend, tree)
        finally:
            del backend.start_sum
        return calls

    tree = job("Linear", tmp_path, task_options={"values": [1.0] * 1000}, log_every_steps=10)
    for calls in pool2.run(work, tree):
        # 500 steps, 50 of them logged: their losses travel with the next message that is due, at most 16 in one.
        assert calls.count("weights") == 1
        assert 500 // 64 <= sum(name.startswith("control.") for name in calls) < 250
    with (tmp_path / "metrics.jsonl").open() as lines:
        assert [json.loads(line)["step"] for line in lines] == list(range(10, 501, 10))
    assert Ran(0, tmp_path, []).w == pytest.approx([-50.0], rel=1e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_microbatch_of_weight_zero_counts_for_nothing_though_its_loss_is_nan(pool2, tmp_path, accumulate):
    """Rank 1's microbatches are all masked; the gradient is rank 0's: x = 3, then 5, or (3 + 5) / 2 in one step."""
    ran = run(
        pool2, job("MaskedTokens", tmp_path, accumulate=accumulate, task_options={"values": [3.0, -1.0, 5.0, -1.0]})
    )
    assert ran.summary["skipped_steps"] == 0
    assert ran.w == pytest.approx([-0.8] if accumulate == 1 else [-0.4])
    assert [line["grad_norm"] for line in ran.metrics] == ([3.0, 5.0] if accumulate == 1 else [4.0])


def masked(pool, tmp_path, values, **keys):
    """Rank 1's microbatch is all masked, its loss and its gradient NaN."""
    options = keys.pop("task_options", {})
    return run(pool, job("MaskedMean", tmp_path, task_options={"values": values, **options}, **keys))


def test_a_nan_of_weight_zero_counts_for_nothing_where_parameters_are_unused(pool2, tmp_path):
    """Rank 0 uses a alone, rank 1 b alone and has no weight: a moves by 0.1 * 3, then by 0.1 * 5."""
    tree = {"find_unused_parameters": True, "task_options": {"heads": ["a", "b"]}}
    ran = masked(pool2, tmp_path, [3.0, -1.0, 5.0, -1.0], **tree)
    assert ran.summary["skipped_steps"] == 0
    assert {name: value.item() for name, value in ran.checkpoint()["model"].items()} == pytest.approx(
        {"a": -0.8, "b": 0.0}
    )


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_nan_of_weight_zero_keeps_sparse_gradients_sparse(pool2, tmp_path, find_unused):
    """x = 3, then 5 on rank 0: the embedding's first row moves by 0.1 * 8, the bias by 0.1 * 2."""
    tree = {"find_unused_parameters": find_unused, "task_options": {"sparse": True}}
    ran = masked(pool2, tmp_path, [3.0, -1.0, 5.0, -1.0], **tree)
    assert ran.summary["skipped_steps"] == 0
    model = ran.checkpoint()["model"]
    assert model["w.weight"].flatten().tolist() == pytest.approx([-0.8, 0.0])
    assert model["bias"].item() == pytest.approx(-0.2)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("keys", [{"sync_every_microbatch": True}, {"static_graph": True}])
def test_a_rank_without_data_in_the_first_step(pool2, tmp_path, keys, accumulate):
    """2 ranks, the second without a sample: the mean of what is there, 1 and 3."""
    tree = job("Ranks", tmp_path, task_options={"values": [[1.0, 3.0], []]}, accumulate=accumulate, **keys)
    ran = run(pool2, tree, limit_s=30)
    assert [line["grad_norm"] for line in ran.metrics] == ([1.0, 3.0] if accumulate == 1 else [2.0])


def test_values_are_means_over_the_microbatches_that_gave_them(pool2, tmp_path):
    """Two microbatches of two ranks in a step; the samples are dealt in turn."""
    steps = [[1.0, 2.0, 12.0, 4.0], [2.0, 4.0, 6.0, 8.0], [2.0, 13.0, 4.0, 21.0], [2.0, 4.0, 2.0, 5.0]]
    values = [x for step in steps for x in step]
    ran = run(pool2, job("Sometimes", tmp_path, task_options={"values": values}, accumulate=2))
    found = [{name: line[name] for name in ("x", "big", "odd") if name in line} for line in ran.metrics]
    assert found == [
        {"x": 4.75, "big": 12.0, "odd": 1.0},
        {"x": 5.0},
        {"x": 10.0, "big": 17.0, "odd": 17.0},
        {"x": 3.25, "odd": 5.0},
    ]


def test_an_evaluation_batch_of_weight_zero_counts_for_nothing_though_its_loss_is_nan(pool2, tmp_path):
    """As below, over 1 and 3: 1.9 * 2; the batches of the negative values have the loss 0/0."""
    ran = run(pool2, job("NoMetrics", tmp_path, task_options={"masked": True}))
    assert ran.summary["eval"] == pytest.approx({"loss": 3.8})


def test_without_metrics_the_mean_loss_is_evaluated(pool2, tmp_path):
    """One step from w = 2: w = 2 - 0.1 * 1; the mean loss over 1, 2, 3 is 1.9 * 2."""
    ran = run(pool2, job("NoMetrics", tmp_path))
    assert ran.summary["eval"] == pytest.approx({"loss": 3.8})
