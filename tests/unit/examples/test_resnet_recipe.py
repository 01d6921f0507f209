"""The ResNet recipe: models, data files, options, printed lines."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from hvdtrain.config import load_config
from hvdtrain.errors import UserError

FOLDER = Path(__file__).parents[3] / "examples" / "resnet"
sys.path.insert(0, str(FOLDER))

cifar10 = importlib.import_module("cifar10")
ResNet = importlib.import_module("resnet_models").ResNet


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"resnet_recipe_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


main = load("main")
Resnet = load("task").Resnet


# The sizes that are published for these networks on CIFAR-10: 11.17, 21.28, 23.52, 42.51 and 58.16 million.
@pytest.mark.parametrize(
    ("architecture", "num_parameters"),
    [
        ("resnet18", 11_173_962),
        ("resnet34", 21_282_122),
        ("resnet50", 23_520_842),
        ("resnet101", 42_512_970),
        ("resnet152", 58_156_618),
    ],
)
def test_models_have_the_published_number_of_parameters(architecture, num_parameters):
    with torch.device("meta"):
        model = ResNet(architecture)
    assert sum(p.numel() for p in model.parameters()) == num_parameters


@pytest.mark.parametrize("architecture", ["resnet18", "resnet50"])
def test_every_parameter_gets_a_gradient_and_the_last_map_is_4x4(architecture):
    torch.manual_seed(1)
    model = ResNet(architecture)
    shapes = []
    model.layer4.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape[2:])))
    scores = model(torch.randn(2, 3, 32, 32))
    assert scores.shape == (2, 10)
    assert shapes == [(4, 4)]
    scores.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model(torch.randn(1, 3, 64, 40)).shape == (1, 10)


def write_records(path: Path, labels: list[int], first_pixel: int = 0) -> None:
    """Image i has red first_pixel + i, green 100 + i, blue 200 + i all over, and the top left red pixel 7."""
    content = bytearray()
    for i, label in enumerate(labels):
        red = bytes([7]) + bytes([first_pixel + i]) * 1023
        content += bytes([label]) + red + bytes([100 + i]) * 1024 + bytes([200 + i]) * 1024
    path.write_bytes(content)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    write_records(folder / "data_batch_1.bin", [3, 1, 4])
    write_records(folder / "data_batch_2.bin", [9, 0], first_pixel=50)
    write_records(folder / "test_batch.bin", [5, 6])
    return tmp_path


def test_binary_files_are_read(data):
    task = Resnet(data=str(data))
    train = task.train_dataset()
    assert train.labels.tolist() == [3, 1, 4, 9, 0]
    assert train.labels.dtype == torch.int64
    assert train.images.shape == (5, 3, 32, 32)
    assert train.images[:, 0, 0, 0].tolist() == [7, 7, 7, 7, 7]
    assert train.images[:, 0, 31, 31].tolist() == [0, 1, 2, 50, 51]
    assert train.images[1, :, 0, 1].tolist() == [1, 101, 201]
    assert task.eval_dataset().labels.tolist() == [5, 6]


def test_pixels_are_normalised(data):
    dataset = Resnet(data=str(data), augment=False).train_dataset()
    images, labels = dataset.__getitems__([4, 0])
    assert images.dtype == torch.float32
    assert labels.tolist() == [0, 3]
    assert images[0, :, 5, 5].tolist() == pytest.approx(
        [(51 / 255 - 0.4914) / 0.2470, (101 / 255 - 0.4822) / 0.2435, (201 / 255 - 0.4465) / 0.2616], abs=1e-5
    )
    loaded = next(iter(DataLoader(Subset(dataset, [4, 0]), batch_size=2, collate_fn=Resnet(data=str(data)).collate)))
    assert torch.equal(loaded[0], images)


def test_augmented_images_are_shifted_or_mirrored_copies():
    torch.manual_seed(1)
    original = torch.arange(1, 3 * 32 * 32 + 1, dtype=torch.float32).view(1, 3, 32, 32)
    padded = torch.nn.functional.pad(original, [4, 4, 4, 4])
    possible = {}
    for mirrored in (False, True):
        for down in range(9):
            for right in range(9):
                crop = padded[:, :, down : down + 32, right : right + 32]
                possible[(down, right, mirrored)] = (crop.flip(3) if mirrored else crop)[0]
    seen = set()
    for image in cifar10.shifted_and_mirrored(original.expand(200, -1, -1, -1)):
        found = [key for key, crop in possible.items() if torch.equal(crop, image)]
        assert len(found) == 1
        seen.add(found[0])
    assert {down for down, _, _ in seen} == {right for _, right, _ in seen} == set(range(9))
    assert {mirrored for _, _, mirrored in seen} == {False, True}


def test_missing_files_say_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        Resnet(data="nowhere")
    for part in ("'nowhere'", "data_batch_*.bin", "cifar-10-binary.tar.gz", "kriz/cifar.html", "--use_syn"):
        assert part in str(error.value)


def test_damaged_files_are_named(data):
    path = data / "cifar-10-batches-bin" / "data_batch_2.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"data_batch_2\.bin: 6145 bytes are no whole number .* of 3073 bytes"):
        Resnet(data=str(data)).train_dataset()
    path.write_bytes(bytes([10]) + whole[1:])
    with pytest.raises(UserError, match=r"data_batch_2\.bin: has the label 10"):
        Resnet(data=str(data)).train_dataset()


def test_options_of_the_task_are_checked():
    with pytest.raises(UserError, match=r"task_options\.arch: 'resnet20' is none of resnet18, "):
        Resnet(arch="resnet20", synthetic_samples=4)
    with pytest.raises(UserError, match=r"image_size: 30 is not a multiple of 8"):
        Resnet(image_size=30, synthetic_samples=4)


def test_synthetic_images_are_one_microbatch_again_and_again():
    task = Resnet(synthetic_samples=6, image_size=16)
    dataset = task.train_dataset()
    assert len(dataset) == 6
    assert task.eval_dataset() is None
    images, labels = dataset.__getitems__([0, 1, 2, 3])
    assert images.shape == (4, 3, 16, 16)
    assert torch.equal(dataset.__getitems__([4, 5])[0], images[:2])
    assert not torch.equal(cifar10.SyntheticImages(6, 16, seed=1).__getitems__([0])[0], images[:1])
    assert labels.min() >= 0
    assert labels.max() <= 9


def test_the_published_line_becomes_a_job():
    chosen = main.options(["--backend=nccl", "--use_syn", "--batch_size=8192", "--arch=resnet152"])
    config = main.job(chosen)
    assert (config.backend, config.transport) == ("ddp", "nccl")
    assert config.task_file() == FOLDER / "task.py"
    assert (config.batch_size, config.epochs, config.seed) == (8192, 100, 0)
    assert config.task_options["arch"] == "resnet152"
    # 20 steps of an epoch, as published.
    assert config.task_options["synthetic_samples"] == 20 * 8192


@pytest.mark.parametrize(
    ("name", "backend", "transport"),
    [
        ("nccl", "ddp", "nccl"),
        ("gloo", "ddp", "gloo"),
        ("mpi", "ddp", "mpi"),
        ("ddp", "ddp", "auto"),
        ("horovod", "horovod", "auto"),
    ],
)
def test_the_recipes_backend_may_be_a_transport(name, backend, transport):
    config = main.job(main.options([f"--backend={name}", "--use_syn"]))
    assert (config.backend, config.transport) == (backend, transport)


def test_the_other_options():
    chosen = main.options(
        [
            "--data",
            "files",
            "--num_epochs",
            "7",
            "--learning_rate",
            "1e-05",
            "--random_seed",
            "3",
            "--model_dir",
            "out",
            "--resume",
            "--local-rank=1",
            "--set",
            "compression=fp16",
        ]
    )
    config = main.job(chosen)
    assert (config.task_options["data"], config.task_options["arch"]) == ("files", "resnet50")
    assert (config.epochs, config.seed, config.output, config.compression) == (7, 3, "out", "fp16")
    assert config.optimizer.lr == 1e-05
    assert config.checkpoint.best.metric == "accuracy"
    assert (chosen.resume, chosen.local_rank) == (True, 1)
    assert main.options(["--local_rank=3"]).local_rank == 3


def test_resume_needs_the_folder(capsys):
    with pytest.raises(SystemExit) as ended:
        main.options(["--resume"])
    assert ended.value.code == 2
    assert "--resume needs --model_dir" in capsys.readouterr().err


def test_printed_lines(capsys):
    lines = main.EpochLines(1, is_root=True)
    lines.epoch_started(0)
    lines.epoch_ended(0, 20, 30.0)
    lines.epoch_started(1)
    lines.epoch_ended(1, 20, 10.0)
    lines.epoch_ended(2, 20, 12.0)
    lines.end()
    assert capsys.readouterr().out.splitlines() == [
        "Local Rank: 1, Epoch: 0, Training ...",
        "num_steps_per_gpu: 20, avg_step_time: 1.5000",
        "Local Rank: 1, Epoch: 1, Training ...",
        "num_steps_per_gpu: 20, avg_step_time: 0.5000",
        "num_steps_per_gpu: 20, avg_step_time: 0.6000",
        "Average epoch time: 11.0000",
    ]
    other = main.EpochLines(0, is_root=False)
    other.epoch_started(4)
    other.epoch_ended(4, 20, 1.0)
    other.end()
    assert capsys.readouterr().out == "Local Rank: 0, Epoch: 4, Training ...\n"


@pytest.mark.parametrize("name", ["cifar10.yaml", "synthetic.yaml"])
def test_job_files_are_valid_from_any_directory(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(FOLDER / name)
    assert config.task_file() == FOLDER / "task.py"
    Resnet(**{**config.task_options, "synthetic_samples": 1})
