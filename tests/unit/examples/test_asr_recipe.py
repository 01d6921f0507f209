"""The speech recipe: corpus, features, CMVN, units, microbatches, model, loss, decoding."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import shutil
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from hvdtrain.config import load_config
from hvdtrain.errors import UserError

pytest.importorskip("kaldi_native_fbank", reason="the speech recipe needs pip install 'hvdtrain[asr]'")
pytest.importorskip("jiwer", reason="the speech recipe needs pip install 'hvdtrain[asr]'")

FOLDER = Path(__file__).parents[3] / "examples" / "asr"
sys.path.insert(0, str(FOLDER))

aishell, batches, building, cmvn, decoding, features, model, prepared, units = (
    importlib.import_module(f"speech.{name}")
    for name in ("aishell", "batches", "building", "cmvn", "decoding", "features", "model", "prepared", "units")
)


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"asr_recipe_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # workers of prepare.py find their function by it
    spec.loader.exec_module(module)
    return module


corpus, prepare, decode = load("corpus"), load("prepare"), load("decode")
SpeechRecognition = load("task").SpeechRecognition

SMALL = {"dim": 16, "num_layers": 1, "num_heads": 2, "ff_factor": 2, "kernel_size": 5, "dropout": 0.0}
TEXTS = {
    "train": ["ab", "cab", "a bad cab", "dad", "bad"],
    "dev": ["dab"],
    "test": ["cad", "a cab"],
}


def write_wav(path: Path, samples: np.ndarray, rate: int = 16000, channels: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())


def write_corpus(root: Path) -> Path:
    """Noise of 0.7 to 1 s in AISHELL-1's folders."""
    noise = np.random.default_rng(1)
    lines = []
    for split, texts in TEXTS.items():
        for number, text in enumerate(texts):
            name = f"S{split}{number}"
            write_wav(
                root / "wav" / split / f"S{number % 2}" / f"{name}.wav", noise.normal(0, 900, 11200 + 960 * number)
            )
            lines.append(f"{name} {text}\n")
    transcript = root / aishell.TRANSCRIPT
    transcript.parent.mkdir(parents=True)
    transcript.write_text("".join(lines))
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = write_corpus(tmp_path_factory.mktemp("corpus"))
    prepare.prepare(root, keep_spaces=True)
    return root


# ---- the made corpus ----


def test_plan_has_500_distinct_sentences_over_the_alphabet_and_keeps_sentences_and_a_voice_apart():
    lines = corpus.plan(1600, 120, seed=1)
    assert len({line.text for line in lines}) == len(lines) == 1840
    train, dev, test = ([line for line in lines if line.split == split] for split in ("train", "dev", "test"))
    assert set("".join(line.text for line in train)) == set("abcdefghijklmnopqrstuvwxyz ")
    assert {line.speaker for line in dev} <= {line.speaker for line in train}
    held_out = {line.speaker.voice for line in test}
    assert len(held_out) == 1
    accent, timbre = held_out.pop().split("+")
    for line in train:
        assert accent != line.speaker.voice.split("+")[0]
        assert timbre not in line.speaker.voice
    assert len({(line.speed, line.pitch) for line in train}) > 100


def test_plan_depends_on_its_arguments_alone():
    assert corpus.plan(50, 5, seed=3) == corpus.plan(50, 5, seed=3)
    assert corpus.plan(50, 5, seed=3) != corpus.plan(50, 5, seed=4)


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_corpus_is_the_same_byte_for_byte_and_reads_as_aishell(tmp_path):
    for name in ("first", "second"):
        corpus.make(tmp_path / name, num_train=8, num_held_out=2, jobs=2)
    first, second = ({p.relative_to(r): p.read_bytes() for p in r.rglob("*.wav")} for r in
                     (tmp_path / "first", tmp_path / "second"))  # fmt: skip
    assert len(first) == 12
    assert first == second
    found = aishell.read_split(tmp_path / "first", "test", keep_spaces=True)
    assert [utterance.speaker for utterance in found] == ["S0101", "S0101"]
    assert [utterance.text for utterance in found] == [
        line.text for line in corpus.plan(8, 2, 1) if line.split == "test"
    ]


def test_corpus_is_not_written_over_another(data):
    with pytest.raises(UserError, match=r"wav is there already"):
        corpus.make(data, num_train=1, num_held_out=1)


def test_a_transcripts_segmentation_goes_and_recordings_without_text_are_left_out(tmp_path):
    write_wav(tmp_path / "wav/train/S0002/BAC009S0002W0122.wav", np.zeros(400))
    write_wav(tmp_path / "wav/train/S0002/BAC009S0002W0123.wav", np.zeros(400))
    (tmp_path / "transcript").mkdir()
    (tmp_path / aishell.TRANSCRIPT).write_text("BAC009S0002W0122 而 对 楼市\n", encoding="utf-8")
    assert [item.text for item in aishell.read_split(tmp_path, "train", keep_spaces=False)] == ["而对楼市"]
    with pytest.raises(UserError, match=r"dev/SPEAKER/ holds no .wav"):
        aishell.read_split(tmp_path, "dev", keep_spaces=False)


# ---- features and CMVN ----


def test_features_have_a_frame_every_10_ms_and_a_tone_lights_up_its_filter():
    options = features.FeatureOptions(num_mels=40, high_hz=7600.0)
    seconds = np.arange(16000) / 16000
    found = features.log_mel((8000 * np.sin(2 * math.pi * 1000 * seconds)).astype(np.float32), 16000, options)
    assert found.shape == (98, 40)  # 1 + (1000 - 25) / 10
    assert found.dtype == np.float32

    def mel(hz: float) -> float:
        return 1127 * math.log(1 + hz / 700)

    # Filter k has its peak at the (k + 1)th of 41 equal steps of the mel scale from 20 Hz to 7600 Hz.
    expected = (mel(1000) - mel(20)) / ((mel(7600) - mel(20)) / 41) - 1
    assert abs(found.mean(axis=0).argmax() - expected) <= 1
    again = features.log_mel((8000 * np.sin(2 * math.pi * 1000 * seconds)).astype(np.float32), 16000, options)
    assert (found == again).all()


def test_audio_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(UserError, match="8000 Hz holds nothing above 4000"):
        features.log_mel(np.zeros(8000, np.float32), 8000, features.FeatureOptions())
    write_wav(tmp_path / "stereo.wav", np.zeros(800), channels=2)
    with pytest.raises(UserError, match="2 channel"):
        features.read_wav(tmp_path / "stereo.wav")
    (tmp_path / "cut.wav").write_bytes(b"RIFF")
    with pytest.raises(UserError, match=r"cut\.wav: cannot be read"):
        features.read_wav(tmp_path / "cut.wav")


def test_cmvn_by_hand(tmp_path):
    sums = cmvn.CmvnSums(2)
    sums.add(np.array([[0, 1], [2, 5]], np.float32))
    sums.add(np.array([[4, 0], [2, 2]], np.float32))
    sums.save(tmp_path / "cmvn.json")
    assert json.loads((tmp_path / "cmvn.json").read_text()) == {
        "mean_stat": [8.0, 8.0], "var_stat": [24.0, 30.0], "frame_num": 4,
    }  # fmt: skip
    mean, inverse_std = cmvn.load_cmvn(tmp_path / "cmvn.json")
    assert mean.tolist() == [2.0, 2.0]
    assert inverse_std.tolist() == pytest.approx([2**-0.5, 3.5**-0.5])
    with pytest.raises(UserError, match=r"prepare\.py computes it"):
        cmvn.load_cmvn(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(UserError, match="not a file of CMVN sums"):
        cmvn.load_cmvn(tmp_path / "other.json")


def test_prepared_features_are_normal_after_cmvn_and_are_those_of_the_files(data):
    split = prepared.PreparedSplit(data / "prepared", "train")
    mean, inverse_std = cmvn.load_cmvn(data / "prepared" / prepared.CMVN)
    frames = np.concatenate([split.features(item) for item in split.items])
    normal = (frames - mean) * inverse_std
    assert np.abs(normal.mean(axis=0)).max() < 1e-3
    assert np.abs(normal.std(axis=0) - 1).max() < 1e-3
    item = split.items[2]
    samples, rate = features.read_wav(data / "wav" / "train" / item.speaker / f"{item.key}.wav")
    assert np.abs(split.features(item) - features.log_mel(samples, rate, features.FeatureOptions())).max() < 0.02
    with pytest.raises(UserError, match=r"run examples/asr/prepare\.py first"):
        prepared.PreparedSplit(data / "prepared", "other")


# ---- text ----


def test_units(tmp_path):
    found = units.Units.of_texts(["b a", "ab"])
    assert len(found) == 6
    assert found.encode("ab z") == [4, 5, 3, units.UNKNOWN]
    assert found.decode([units.EDGE, 4, 5, units.BLANK, 3, units.UNKNOWN]) == "ab ?"
    found.save(tmp_path / "units.txt")
    assert (tmp_path / "units.txt").read_text() == "<blank> 0\n<unk> 1\n<sos/eos> 2\n<space> 3\na 4\nb 5\n"
    assert units.Units.load(tmp_path / "units.txt").encode("ba ") == [5, 4, 3]


@pytest.mark.parametrize(
    ("said", "heard", "errors", "count"),
    [
        (["abcd"], ["abed"], 1, 4),  # another character
        (["abcd"], ["acd"], 1, 4),  # one too few
        (["ab"], ["aabb"], 2, 2),  # two too many
        (["a b"], ["ab"], 1, 3),  # a space is a character
        (["ab", "cde"], ["ab", ""], 3, 5),
    ],
)
def test_character_errors_by_hand(said, heard, errors, count):
    assert decoding.character_errors(said, heard) == (errors, count)


def test_greedy_decoding_merges_repeats_and_drops_blanks():
    known = units.Units(["a", "b"])
    path = [0, 3, 3, 0, 3, 4, 4, 0, 4, 4]
    scores = torch.full((2, 10, 5), -9.0)
    for frame, unit in enumerate(path):
        scores[:, frame, unit] = 0.0
    found = model.Scores(scores, torch.tensor([10, 6]), None)
    assert decoding.ctc_greedy(found, known) == ["aabb", "aab"]


# ---- microbatches ----


def items(*lengths: int) -> list:
    return [prepared.Item(f"u{n}", "S", "a", 0, length) for n, length in enumerate(lengths)]


def test_packing_keeps_to_the_padded_size_and_uses_every_utterance_once():
    lengths = [(37 * n) % 300 + 50 for n in range(200)] + [2000]
    found = batches.pack(items(*lengths), 800, seed=0)
    for batch in found:
        assert len(batch) * max(item.num_frames for item in batch) <= 800 or len(batch) == 1
    assert sorted(item.key for batch in found for item in batch) == sorted(f"u{n}" for n in range(201))
    padded = sum(len(batch) * max(item.num_frames for item in batch) for batch in found)
    assert padded < 1.1 * sum(lengths)
    assert found == batches.pack(items(*lengths), 800, seed=0)


def test_masks_hide_part_of_an_utterance_and_leave_the_original_alone():
    given = torch.randn(100, 40)
    kept = given.clone()
    torch.manual_seed(2)
    masked = batches.mask(given, 2)
    assert torch.equal(given, kept)
    changed = masked != given
    assert 0 < changed.float().mean() < 0.6
    assert torch.allclose(masked[changed], given.mean(dim=0).expand(100, 40)[changed])


def test_speech_that_is_too_fast_for_ctc_is_named(data):
    task = SpeechRecognition(str(data), model=SMALL)
    assert len(task.train.items) == 5
    item = prepared.Item("fast", "S", "aab", 0, 12)  # three frames of 40 ms, and "aa" needs a blank
    split = type("Split", (), {"items": [item]})
    with pytest.raises(UserError, match="utterance fast: 12 frames are too few for 3 characters"):
        batches.check_ctc([split], task.units)


# ---- model and loss ----


def test_padding_changes_nothing():
    torch.manual_seed(1)
    net = model.SpeechModel(torch.randn(40), torch.rand(40) + 0.5, 7, model.ModelOptions(**SMALL)).eval()
    lengths = torch.tensor([101, 63])
    given, said = torch.randn(2, 101, 40), torch.randint(3, 7, (2, 6))
    both = net(given, lengths, said)
    assert both.ctc.shape == (2, 26, 7)
    assert both.num_frames.tolist() == [26, 16]
    assert both.decoder.shape == (2, 7, 7)
    alone = net(given[1:, :63], lengths[1:], said[1:])
    assert torch.allclose(both.ctc[1, :16], alone.ctc[0], atol=1e-5)
    assert torch.allclose(both.decoder[1], alone.decoder[0], atol=1e-5)


def test_the_decoder_does_not_see_what_it_is_to_guess():
    torch.manual_seed(1)
    net = model.SpeechModel(torch.zeros(40), torch.ones(40), 7, model.ModelOptions(**SMALL)).eval()
    given, lengths = torch.randn(1, 60, 40), torch.tensor([60])
    first = net(given, lengths, torch.tensor([[3, 4, 5, 6]])).decoder
    other = net(given, lengths, torch.tensor([[3, 4, 6, 3]])).decoder
    assert torch.allclose(first[0, :3], other[0, :3], atol=1e-6)
    assert not torch.allclose(first[0, 3], other[0, 3], atol=1e-3)


def test_loss_is_per_character_so_weights_make_microbatches_equal_to_one_large_batch(data):
    task = SpeechRecognition(str(data), model=SMALL, num_masks=0, max_frames=250)
    torch.manual_seed(1)
    net = task.model()
    parts = [task.loss(net, batch) for batch in task.train_dataset()]
    assert len(parts) > 1
    whole = SpeechRecognition(str(data), model=SMALL, num_masks=0, max_frames=5000)
    (everything,) = whole.train_dataset()
    loss, weight, values = whole.loss(net, everything)
    assert weight == sum(len(text) for text in TEXTS["train"])
    total = sum(part_weight * part.item() for part, part_weight, _ in parts)
    assert total / weight == pytest.approx(loss.item(), rel=1e-4)
    assert loss.item() == pytest.approx(0.7 * values["ctc_loss"] + 0.3 * values["attention_loss"], rel=1e-5)


def test_ctc_loss_of_a_uniform_model_by_hand(data):
    task = SpeechRecognition(str(data), model=SMALL)
    # One character in two frames of uniform guesses among U units: paths aa, a-, -a, so -log(3 / U^2).
    scores = model.Scores(torch.full((1, 2, len(task.units)), -math.log(len(task.units))), torch.tensor([2]), None)
    batch = batches.Batch(torch.zeros(1, 8, 40), torch.tensor([8]), torch.tensor([[4]]), torch.tensor([1]), 0)
    ctc, attention = task._losses(scores, batch)
    assert ctc.item() == pytest.approx(-math.log(3 / len(task.units) ** 2), rel=1e-5)
    assert attention is None


def test_evaluation_counts_each_split_apart(data):
    task = SpeechRecognition(str(data), model=SMALL)
    net = task.model().eval()
    totals: dict[str, list[float]] = {}
    with torch.no_grad():
        for batch in task.eval_dataset():
            for name, pair in task.metrics(net, batch).items():
                totals[name] = [a + b for a, b in zip(totals.get(name, [0, 0]), pair, strict=True)]
    assert totals["cer_dev"][1] == len("dab")
    assert totals["cer_test"][1] == len("cad") + len("a cab")
    assert totals["cer"][0] == totals["cer_dev"][0] + totals["cer_test"][0]


def test_without_attention_loss_there_is_no_decoder(data):
    task = SpeechRecognition(str(data), model=SMALL, ctc_weight=1.0)
    net = task.model()
    assert net.decoder is None
    loss, _, values = task.loss(net, task.train_dataset()[0])
    loss.backward()
    assert set(values) == {"ctc_loss"}
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_wrong_options_are_refused(data, tmp_path):
    with pytest.raises(UserError, match="ctc_weight is 2"):
        SpeechRecognition(str(data), ctc_weight=2)
    with pytest.raises(UserError, match=r"task_options\.model.*known are dim"):
        SpeechRecognition(str(data), model={"width": 3})
    with pytest.raises(UserError, match=r"prepare\.py writes it"):
        SpeechRecognition(str(tmp_path))
    with pytest.raises(UserError, match="there is no checkpoint"):
        SpeechRecognition(str(data), model=SMALL, checkpoint=str(tmp_path / "none.pt")).model()


# ---- checkpoints, decoding, job files ----


@pytest.fixture
def checkpoint(data, tmp_path) -> Path:
    task = SpeechRecognition(str(data), model=SMALL)
    torch.manual_seed(5)
    options = {"data": str(data), "model": SMALL}
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save({"model": task.model().state_dict(), "config": {"task_options": options}}, folder / "step-00000003.pt")
    return folder / "step-00000003.pt"


def test_checkpoint_option_starts_from_its_weights_and_keeps_the_cmvn_of_the_task(data, checkpoint, tmp_path):
    other = cmvn.CmvnSums(40)
    other.add(np.random.default_rng(1).normal(size=(50, 40)).astype(np.float32))
    other.save(tmp_path / "other.json")
    torch.manual_seed(6)
    options = {"model": SMALL, "cmvn": str(tmp_path / "other.json")}
    net = SpeechRecognition(str(data), checkpoint=str(checkpoint), **options).model()
    saved = torch.load(checkpoint, weights_only=True)["model"]
    assert torch.equal(net.ctc_head.weight, saved["ctc_head.weight"])
    assert torch.allclose(net.mean, torch.from_numpy(cmvn.load_cmvn(tmp_path / "other.json")[0]))
    with pytest.raises(UserError, match="does not fit this model"):
        SpeechRecognition(str(data), checkpoint=str(checkpoint), model={**SMALL, "dim": 8}).model()


@pytest.mark.parametrize("mode", ["ctc", "attention"])
def test_decode_prints_a_cer_and_writes_what_was_heard(data, checkpoint, tmp_path, mode):
    run, text = str(checkpoint.parents[1]), tmp_path / "heard.txt"
    options = ["--data", str(data), "--checkpoint", run, "--split", "test", "--mode", mode, "--text", str(text)]
    result = CliRunner().invoke(decode.main, options)
    assert result.exit_code == 0, result.output
    assert f"test, {mode} greedy: CER " in result.output
    assert "of 8 characters, 2 utterances)" in result.output
    assert [line.split()[0] for line in text.read_text().splitlines()] == ["Stest0", "Stest1"]


def test_decode_says_what_is_wrong(data, tmp_path):
    result = CliRunner().invoke(decode.main, ["--data", str(data), "--checkpoint", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no checkpoints/step-*.pt" in result.output


@pytest.mark.parametrize("name", ["asr.yaml", "aishell.yaml"])
def test_job_files_are_valid_and_fit_the_task(name, data):
    config = load_config(FOLDER / name)
    assert config.batch_size is None
    assert config.accumulate == 4
    assert config.clip_norm is not None
    assert config.lr.warmup_steps > 0
    SpeechRecognition(**{**config.task_options, "data": str(data), "cmvn": None})


# ---- the table ----


def test_table_from_results_by_hand(data, tmp_path):
    table = load("table")
    bench = table.Bench.__new__(table.Bench)
    bench.bits_per_s, bench.speed_steps = 1e9, 40

    def result(rate: float, cer: float, sent: float | None):
        found = {"cer": cer, "cer_dev": cer, "cer_test": cer + 0.01} if cer else {}
        return table.Result(rate, 1600, 480, 12, sent, found)

    one, two, *others = table.ROWS
    results = {one: [result(80.0, 0.05, None), result(80.0, 0.07, None)], two: [result(150.0, 0.06, 3.5e6)] * 2}
    results |= {row: [result(40.0, 0.0, 7e6)] for row in others}
    text = table.report(bench, results, [1, 2])
    assert "| 1 | none | ddp | 8 |  |  | 20.0, 20.0 | 80.0 | 1.00 | 0 | 5.00%, 7.00% | 6.00%, 8.00% |" in text
    assert "| 2 | 1 Gbit/s | ddp | 4 | on | fp16 | 10.7, 10.7 | 150.0 | 1.88 | 3.50 | 6.00%, 6.00% |" in text
    assert "| 2 | 1 Gbit/s | ddp | 4 | off | none | 40.0 | 40.0 | 0.50 | 7.00 | not trained | not trained |" in text
    assert "train 0.50 times as fast as one" in text
    assert "| 1 (2 jobs at once, the mean) | none | ddp | 8 |  |  | 40.0 | 40.0 | 0.50 | 7.00 | not trained |" in text
    assert "a host here trains 0.50 times as fast when" in text
    assert "Two hosts train 3.75 times as fast as one that shares" in " ".join(text.split())
    assert "train 1.88 times as fast (seed by seed: 1.88, 1.88)" in text
    assert "dev: means 6.00% and 6.00%, apart by 0.00%; one host's seeds spread over 2.00%" in text
    # 10.7 s an epoch of 40 steps; 3.5 MB at 1 Gbit/s.
    assert "A step takes 267" in text
    assert "28 ms of it" in text
    assert "{" not in text
