"""The MNIST example: its data, its split, its model, its job files."""

import gzip
import hashlib
import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from hvdtrain.config import load_config
from hvdtrain.errors import UserError

FOLDER = Path(__file__).parents[3] / "examples" / "mnist"


def _load_module():
    spec = importlib.util.spec_from_file_location("mnist_example_task", FOLDER / "task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Mnist = _load_module().Mnist


@pytest.fixture(scope="module")
def task():
    return Mnist(str(FOLDER / "data"))


def test_shipped_files_are_the_published_ones():
    sums = {path.name: hashlib.md5(gzip.decompress(path.read_bytes())).hexdigest() for path in FOLDER.glob("data/*.gz")}
    assert sums == {
        "t10k-images-idx3-ubyte.gz": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte.gz": "27ae3e4e09519cfbb04c329615203637",
    }


def test_every_fifth_image_is_held_out(task):
    train, test = task.train_dataset(), task.eval_dataset()
    assert (len(train), len(test)) == (8000, 2000)
    assert train.images.shape == (8000, 28, 28)
    assert torch.bincount(train.labels).tolist() == [801, 882, 814, 821, 790, 738, 771, 822, 758, 803]
    assert torch.bincount(test.labels).tolist() == [179, 253, 218, 189, 192, 154, 187, 206, 216, 206]
    assert train.labels[:5].tolist() == [7, 2, 1, 0, 1]
    assert test.labels[:5].tolist() == [4, 9, 1, 4, 4]
    assert int(train.images.sum(dtype=torch.int64)) == 212662582
    assert int(test.images.sum(dtype=torch.int64)) == 52260618


def test_a_folder_with_the_training_files_is_used_whole(tmp_path):
    for path in FOLDER.glob("data/*.gz"):
        shutil.copy(path, tmp_path)
    # 7 images and labels stand for the 60,000: the sizes come from the files.
    images = gzip.decompress((FOLDER / "data" / "t10k-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((FOLDER / "data" / "t10k-labels-idx1-ubyte.gz").read_bytes())
    (tmp_path / "train-images-idx3-ubyte").write_bytes(
        images[:4] + (7).to_bytes(4, "big") + images[8 : 16 + 7 * 28 * 28]
    )
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels[:4] + (7).to_bytes(4, "big") + labels[8 : 8 + 7])
    task = Mnist(str(tmp_path))
    assert task.train_dataset().labels.tolist() == [7, 2, 1, 0, 4, 1, 4]
    assert len(task.eval_dataset()) == 10000
    assert int(task.eval_dataset().labels.sum()) == 44434


def test_single_samples_and_microbatches_agree(task):
    dataset = task.train_dataset()
    images, labels = task.collate(dataset.__getitems__([3, 1, 7999]))
    assert images.shape == (3, 1, 28, 28)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    stacked = task.collate([dataset[3], dataset[1], dataset[7999]])
    assert torch.equal(stacked[0], images)
    assert torch.equal(stacked[1], labels)
    assert float(images.max()) == 1.0
    loaded = next(iter(DataLoader(Subset(dataset, [3, 1, 7999]), batch_size=3, collate_fn=task.collate)))
    assert torch.equal(loaded[0], images)


def test_loss_and_metrics(task):
    torch.manual_seed(1)
    model = task.model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 215370
    batch = task.collate(task.eval_dataset().__getitems__(list(range(5))))
    with torch.no_grad():
        torch.nn.init.zeros_(model[-1].weight)
        model[-1].bias.copy_(torch.tensor([0.0, 0, 0, 0, 1, 0, 0, 0, 0, 0]))
    loss = task.loss(model, batch)
    # Labels 4, 9, 1, 4, 4: log(9 + e) for each, less 1 for each 4.
    expected = float(torch.log(torch.tensor(9 + torch.e))) - 3 / 5
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    metrics = task.metrics(model, batch)
    assert (int(metrics["accuracy"][0]), metrics["accuracy"][1]) == (3, 5)
    assert metrics["loss"][0].item() == pytest.approx(5 * expected, abs=1e-5)
    assert metrics["loss"][1] == 5


def test_dropout_and_batch_norm_are_options(task):
    def layers(model):
        return [type(layer).__name__ for layer in model]

    plain = layers(task.model())
    assert "Dropout" not in plain
    assert "BatchNorm2d" not in plain
    both = Mnist(str(FOLDER / "data"), dropout=0.25, batch_norm=True).model()
    assert layers(both).count("BatchNorm2d") == 2
    assert [layer.p for layer in both if isinstance(layer, torch.nn.Dropout)] == [0.25]


def test_data_is_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(Mnist("examples/mnist/data").train_dataset()) == 8000
    assert len(Mnist().train_dataset()) == 8000


def test_errors_name_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"task_options\.data: no folder nowhere in "):
        Mnist("nowhere")
    with pytest.raises(UserError, match=r"holds no t10k-images-idx3-ubyte\.gz; task_options\.data names"):
        Mnist(str(tmp_path))
    for path in FOLDER.glob("data/*.gz"):
        shutil.copy(path, tmp_path)
    labels = tmp_path / "t10k-labels-idx1-ubyte.gz"
    whole = labels.read_bytes()
    labels.write_bytes(whole[:1000])
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte\.gz: damaged"):
        Mnist(str(tmp_path))
    labels.write_bytes(gzip.compress(gzip.decompress(whole)[:-1]))
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte\.gz: not an IDX file of bytes, or cut short"):
        Mnist(str(tmp_path))
    labels.write_bytes(gzip.compress(b"\0\0\x08\x01" + (3).to_bytes(4, "big") + b"123"))
    with pytest.raises(UserError, match=r"10000 t10k images but 3 labels"):
        Mnist(str(tmp_path))


@pytest.mark.parametrize("name", ["ddp.yaml", "horovod-fp16.yaml", "full.yaml"])
def test_job_files_are_valid_from_any_directory(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(FOLDER / name)
    assert config.task_file() == FOLDER / "task.py"
    assert (config.backend, config.compression) == (
        ("horovod", "fp16") if name == "horovod-fp16.yaml" else ("ddp", "none")
    )
