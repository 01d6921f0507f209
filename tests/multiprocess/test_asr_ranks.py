"""The speech recipe on two ranks under every backend: dynamic microbatches, both losses, the same step as one rank."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
from trainer_runs import run

from hvdtrain.config import load_config
from hvdtrain.data.seeding import seed_all
from hvdtrain.task import load_task

pytest.importorskip("kaldi_native_fbank", reason="the speech recipe needs pip install 'hvdtrain[asr]'")
pytest.importorskip("jiwer", reason="the speech recipe needs pip install 'hvdtrain[asr]'")

FOLDER = Path(__file__).parents[2] / "examples" / "asr"
MODEL = "{dim: 16, num_layers: 1, num_heads: 2, ff_factor: 2, kernel_size: 5, dropout: 0.0}"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A prepared corpus of noise: 22 utterances to train on, of 0.6 to 1.5 s."""
    sys.path.insert(0, str(FOLDER))
    prepare = importlib.import_module("prepare").prepare
    root, noise, lines = tmp_path_factory.mktemp("asr"), np.random.default_rng(1), []
    for split, count in (("train", 22), ("dev", 3), ("test", 2)):
        for number in range(count):
            path = root / "wav" / split / "S1" / f"{split}{number:02d}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            with wave.open(str(path), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(16000)
                samples = noise.normal(0, 900, 9600 + 650 * ((number * 7) % 22))
                file.writeframes(samples.astype("<i2").tobytes())
            lines.append(f"{path.stem} {'abc de'[: 2 + number % 5]}x\n")
    (root / "transcript").mkdir()
    (root / "transcript" / "aishell_transcript_v0.8.txt").write_text("".join(lines))
    prepare(root, keep_spaces=True)
    return root


def test_both_backends_train_to_the_same_weights(data, tmp_path):
    options = [f"data={data}", f"model={MODEL}", "max_frames=120"]
    sets = [*(f"task_options.{option}" for option in options), "accumulate=2", "device=cpu"]
    flags = [argument for pair in sets for argument in ("--set", pair)]
    line = [sys.executable, "-m", "hvdtrain", "parity", str(FOLDER / "asr.yaml"), "--output", str(tmp_path), *flags]
    ended = subprocess.run(line, capture_output=True, text=True, check=False, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (compared,) = json.loads((tmp_path / "certificate.json").read_text())["comparisons"]
    assert compared["tolerance"] == 1e-5
    assert compared["loss"]["num_steps"] == 20
    # Two ranks: a sum of two numbers has no order to differ in.
    assert compared["loss"]["largest_relative"] == 0.0
    assert compared["weights"]["num_differing"] == 0


def test_a_step_of_two_ranks_is_the_step_of_one_and_both_losses_are_logged(pool2, data, tmp_path):
    options = [f"data={data}", f"model={MODEL}", "num_masks=0", "max_frames=250"]
    keys = ["shuffle=false", "epochs=null", "max_steps=3", "log_every_steps=1", "lr.schedule=constant", "device=cpu"]
    config = load_config(FOLDER / "asr.yaml", [*(f"task_options.{option}" for option in options), *keys])
    ran = run(pool2, {**config.to_dict(), "task": f"{FOLDER}/task.py:SpeechRecognition", "output": str(tmp_path)})
    assert ran.status == 0
    assert ran.summary["ranks_agree"] is True
    assert set(ran.summary["eval"]) == {"cer", "cer_dev", "cer_test", "ctc_loss"}

    task = load_task(config)
    seed_all(config.seed)
    model = task.model()
    microbatches = task.train_dataset()
    assert len(microbatches) > 8
    found = [task.loss(model, microbatches[index]) for index in range(8)]
    characters = sum(weight for _, weight, _ in found)
    first = ran.metrics[0]
    assert first["loss"] == pytest.approx(sum(loss.item() * weight for loss, weight, _ in found) / characters, rel=1e-5)
    for name in ("ctc_loss", "attention_loss"):
        expected = sum(values[name] * weight for _, weight, values in found) / characters
        assert first[name] == pytest.approx(expected, rel=1e-5)
