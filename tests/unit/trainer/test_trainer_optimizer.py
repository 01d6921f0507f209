"""The optimizer that the YAML file names, and when torch's fused kernel is taken."""

import pytest
import torch
from torch import nn

from hvdtrain.config import load_config
from hvdtrain.errors import ConfigError
from hvdtrain.trainer.optimizer import make_optimizer


def optimizer(tmp_path, text, model=None, more=""):
    (tmp_path / "job.yaml").write_text(f"task: module:Task\noptimizer: {text}\n{more}")
    return make_optimizer(object(), load_config(tmp_path / "job.yaml"), model or nn.Linear(1, 1))


def test_optimizers_by_name(tmp_path):
    made = optimizer(tmp_path, "{name: AdamW, lr: 0.5, weight_decay: 0.25}")
    assert isinstance(made, torch.optim.AdamW)
    assert (made.defaults["lr"], made.defaults["weight_decay"]) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{name: adamw}", r"line 2: optimizer\.name: torch\.optim has no adamw; did you mean AdamW\?"),
        ("{name: Nothing}", "torch.optim has no Nothing; it has ASGD, Adadelta"),
        ("{name: Optimizer}", "torch.optim has no Optimizer"),
        ("{name: SGD, lr: 0.1, momentumm: 0.9}", r"torch\.optim\.SGD does not take these options.*momentumm"),
        ("{name: SGD, lr: 0.1, nesterov: true}", "does not take these options: Nesterov"),
    ],
)
def test_wrong_optimizers(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        optimizer(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "fused"),
    [
        ("{name: SGD, lr: 0.1}", True),
        ("{name: Adam, lr: 0.1}", True),
        ("{name: Adagrad, lr: 0.1}", True),
        ("{name: SGD, lr: 0.1, fused: false}", False),
        ("{name: SGD, lr: 0.1, foreach: true}", None),
        ("{name: AdamW, lr: 0.1, differentiable: true}", None),
        ("{name: RMSprop, lr: 0.1}", None),
    ],
)
def test_the_fused_kernel_unless_the_file_chooses(tmp_path, text, fused):
    assert optimizer(tmp_path, text).defaults.get("fused") is fused


def test_no_fused_kernel_where_it_would_fail(tmp_path):
    text = "{name: SGD, lr: 0.1}"
    assert optimizer(tmp_path, text, nn.Embedding(2, 2, sparse=True)).defaults["fused"] is None
    assert optimizer(tmp_path, text, more="find_unused_parameters: true\n").defaults["fused"] is None
    assert optimizer(tmp_path, text, nn.Linear(1, 1).to(torch.bfloat16)).defaults["fused"] is None


@pytest.mark.parametrize(
    "text",
    [
        "{name: SGD, lr: 0.1, momentum: 0.9, weight_decay: 0.1, nesterov: true}",
        "{name: Adam, lr: 0.1, weight_decay: 0.1}",
        "{name: AdamW, lr: 0.1}",
        "{name: Adagrad, lr: 0.1}",
    ],
)
def test_the_fused_kernel_gives_the_same_weights(tmp_path, text):
    found = []
    for choice in ("", ", fused: false"):
        torch.manual_seed(1)
        model = nn.Linear(5, 3)
        made = optimizer(tmp_path, text.replace("}", choice + "}"), model)
        for _ in range(5):
            made.zero_grad()
            (model(torch.ones(2, 5)) ** 2).sum().backward()
            made.step()
        found.append(model.weight.detach().clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
