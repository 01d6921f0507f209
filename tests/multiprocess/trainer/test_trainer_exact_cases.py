"""Cases whose every number can be worked out by hand: loss = mean(w * x), w starts at 0, SGD with lr 0.1."""

from __future__ import annotations

import pytest
from trainer_runs import job, run

# Sample j is (j//2 + 1) + 10 * (j % 2): rank 0 gets 1..7, rank 1 gets 11..17.
CASE_A = [float(j // 2 + 1 + 10 * (j % 2)) for j in range(14)]


@pytest.mark.parametrize(("epochs", "w"), [(1, -2.9), (2, -5.8)])
def test_a_accumulates_and_divides_the_tail_group_by_its_size(pool2, tmp_path, epochs, w):
    ran = run(pool2, job("Linear", tmp_path, task_options={"values": CASE_A}, accumulate=3, epochs=epochs))
    assert ran.status == 0
    assert ran.w == pytest.approx([w], rel=1e-6)
    assert [line["grad_norm"] for line in ran.metrics] == pytest.approx([7, 10, 12] * epochs, rel=1e-6)
    assert ran.summary["steps"] == 3 * epochs
    assert ran.summary["epochs"] == epochs
    assert ran.seen[0] == [[float(x)] for x in range(1, 8)] * epochs
    assert ran.seen[1] == [[float(x)] for x in range(11, 18)] * epochs


def test_b_reduces_in_the_last_microbatch_of_each_step_only(pool2, tmp_path):
    from trainer_runs import train_here

    def work(backend, tree):
        import small_tasks_probe as probe

        with probe.counted_reductions(backend) as reductions_so_far:
            status, seen = train_here(backend, tree)
        return status, len(seen), reductions_so_far()

    tree = job("Mlp", tmp_path, accumulate=4)
    for status, num_microbatches, counts in pool2.run(work, tree):
        assert status == 0
        assert num_microbatches == 8
        # Reductions that had been started when microbatch 1, 2, ... ended.
        assert counts == [0, 0, 0, 1, 1, 1, 1, 2]


def test_sync_every_microbatch_reduces_in_each(pool2, tmp_path):
    from trainer_runs import train_here

    def work(backend, tree):
        import small_tasks_probe as probe

        with probe.counted_reductions(backend) as reductions_so_far:
            train_here(backend, tree)
        return reductions_so_far()

    tree = job("Mlp", tmp_path, accumulate=4, sync_every_microbatch=True)
    assert pool2.run(work, tree) == [[1, 2, 3, 4, 5, 6, 7, 8]] * 2


ONES = {"values": [[1.0] * 10, [1.0] * 7]}
FOURS = {"values": [[1.0] * 10, [4.0] * 7]}


def test_c_stop_ends_with_the_first_rank_that_has_nothing_left(pool2, tmp_path):
    ran = run(pool2, job("Ranks", tmp_path, task_options=ONES, accumulate=2, uneven_data="stop"))
    assert ran.summary["steps"] == 4
    assert ran.w == pytest.approx([-0.4], rel=1e-6)


def test_c_fill_goes_on_without_the_exhausted_rank(pool2, tmp_path):
    ran = run(pool2, job("Ranks", tmp_path, task_options=ONES, accumulate=2))
    assert ran.summary["steps"] == 5
    assert ran.w == pytest.approx([-0.5], rel=1e-6)
    assert [len(seen) for seen in ran.seen] == [10, 7]


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("weight", [None, 8192.0])
def test_c_fill_takes_the_mean_over_the_samples_present(pool2, tmp_path, compression, weight):
    held_out = [float(x) for x in range(1, 8)]
    tree = job(
        "Ranks",
        tmp_path,
        task_options={**FOURS, "weight": weight, "held_out": held_out},
        accumulate=2,
        compression=compression,
    )
    from trainer_runs import train_here

    def work(backend, tree):
        import torch

        result = train_here(backend, tree)
        # The connection is as good as new.
        total = backend.all_reduce(torch.tensor([float(backend.world.rank + 1)]))
        return (*result, total.item())

    outcomes = pool2.run(work, tree)
    from trainer_runs import Ran

    ran = Ran(0, tmp_path, [seen for _, seen, _ in outcomes])
    assert [total for _, _, total in outcomes] == [3.0, 3.0]
    # fp16 carries 2.5, 2, 1 and their halves exactly.
    assert [line["grad_norm"] for line in ran.metrics] == [2.5, 2.5, 2.5, 2.0, 1.0]
    assert ran.w == pytest.approx([-1.05], rel=1e-6)
    assert ran.summary["eval"]["mean"] == 4.0
    assert ran.checkpoints() == ["step-00000005.pt"]


def test_d_clips_the_averaged_gradient(pool2, tmp_path):
    ran = run(pool2, job("TwoGradients", tmp_path, clip_norm=1.0, max_steps=1))
    assert [line["grad_norm"] for line in ran.metrics] == [pytest.approx(3.1623, abs=5e-5)]
    assert ran.w == pytest.approx([-0.09487, -0.03162], abs=5e-6)


def test_d_takes_one_gradient_reduction(pool2, tmp_path):
    from trainer_runs import train_here

    def work(backend, tree):
        import small_tasks_probe as probe

        with probe.counted_reductions(backend) as reductions_so_far:
            train_here(backend, tree)
        return reductions_so_far()

    assert pool2.run(work, job("TwoGradients", tmp_path, clip_norm=1.0, max_steps=1)) == [[1], [1]]


INFINITE = float("inf")


def test_e_an_infinity_on_one_rank_makes_all_skip_and_the_scheduler_wait(pool2, tmp_path):
    values = [1.0, 1.0, 1.0, INFINITE, 1.0, 1.0]  # rank 1's second
    ran = run(pool2, job("Halving", tmp_path, task_options={"values": values}, precision="fp16", loss_scale=65536.0))
    state = ran.checkpoint()
    assert ran.summary["skipped_steps"] == 1
    assert ran.summary["steps"] == 3
    assert state["scaler"]["scale"] == 32768.0
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.1 / 4
    assert [line["lr"] for line in ran.metrics] == [0.1, 0.05, 0.05]
    assert ran.w == pytest.approx([-(0.1 + 0.05)], rel=1e-6)


def test_f_forty_thousand_survives_fp16_compression(pool2, tmp_path):
    ran = run(pool2, job("Linear", tmp_path, task_options={"values": [40000.0] * 2}, compression="fp16"))
    assert [line["grad_norm"] for line in ran.metrics] == [40000.0]
    assert ran.w == pytest.approx([-4000.0], rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("other", [1.0, -1e5])
def test_f_an_overflow_of_fp16_compression_is_skipped(pool2, tmp_path, precision, other):
    # With a loss scale of 1 the middle step alone overflows.
    values = [1.0, 1.0, 1e5, other, 1.0, 1.0]
    tree = job("Linear", tmp_path, task_options={"values": values}, compression="fp16", precision=precision)
    ran = run(pool2, {**tree, "loss_scale": 1.0})
    assert ran.summary["skipped_steps"] == 1
    assert ran.w == pytest.approx([-0.2], rel=1e-6)
    assert [line["grad_norm"] for line in ran.metrics][::2] == [1.0, 1.0]
    assert ran.metrics[1]["grad_norm"] is None


def test_only_skipping_ends_with_an_error_that_names_the_parameter(pool2, tmp_path):
    tree = job("Linear", tmp_path, task_options={"values": [INFINITE] * 120})
    for outcome in pool2.run_all(__import__("trainer_runs").train_here, tree):
        assert outcome.kind == "TrainingFailed"
        assert outcome.text.startswith("50 steps in a row had a gradient that is not finite; first at fault: w.")


def test_m_the_learning_rate_is_scaled_by_the_effective_batch(pool2, tmp_path):
    found = {}
    for accumulate in (1, 2):
        for scaling in ("none", "linear", "sqrt"):
            tree = job(
                "Linear",
                tmp_path / f"{scaling}{accumulate}",
                task_options={"values": [1.0] * 64},
                batch_size=4,
                accumulate=accumulate,
                lr={"scaling": scaling, "base_batch": 8},
                max_steps=2,
            )
            found[accumulate, scaling] = [line["lr"] for line in run(pool2, tree).metrics]
    assert found == {
        (1, "none"): [0.1] * 2,
        (1, "linear"): [0.1] * 2,
        (1, "sqrt"): [0.1] * 2,
        (2, "none"): [0.1] * 2,
        (2, "linear"): [0.2] * 2,
        (2, "sqrt"): [pytest.approx(0.1414, abs=5e-5)] * 2,
    }


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_m_a_resume_does_not_scale_again(pool2, tmp_path, schedule):
    tree = job(
        "Linear",
        tmp_path,
        task_options={"values": [1.0] * 64},
        batch_size=4,
        accumulate=2,
        lr={"scaling": "linear", "base_batch": 8, "schedule": schedule},
        max_steps=2,
    )
    run(pool2, tree)
    rates = [line["lr"] for line in run(pool2, {**tree, "max_steps": 4}, resume="auto").metrics]
    if schedule == "constant":
        assert rates == [0.2] * 4
    else:
        # Cosine over 2 steps, then over 4: 0.2 * (1 + cos(pi * k / n)) / 2.
        assert rates == pytest.approx([0.2, 0.1, 0.1, 0.2 * 0.1464466], abs=1e-6)
