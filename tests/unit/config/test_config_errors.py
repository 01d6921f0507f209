"""What a person reads when the job file is wrong: file, line, key, what is wrong, the nearest right key."""

import pytest

from hvdtrain.config import load_config
from hvdtrain.errors import EXIT_USER_ERROR, ConfigError


@pytest.fixture
def message(tmp_path, monkeypatch):
    """Loads a job file with this text, in the folder it is in, and gives the message of the error."""
    monkeypatch.chdir(tmp_path)

    def load(text: str | bytes, overrides=(), **flags) -> str:
        content = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "job.yaml").write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load_config("job.yaml", overrides, **flags)
        assert caught.value.exit_status == EXIT_USER_ERROR
        return str(caught.value)

    return load


ONE_LINE = [
    ("epoch: 3", "epoch: unknown key; did you mean epochs?"),
    ("Batch-Size: 3", "Batch-Size: unknown key; did you mean batch_size?"),
    ("warmup_steps: 3", "warmup_steps: unknown key; did you mean lr.warmup_steps?"),
    ("learning_rate: 0.1", "learning_rate: unknown key; did you mean optimizer.lr?"),
    ("gradient_accumulation_steps: 4", "gradient_accumulation_steps: unknown key; did you mean accumulate?"),
    ("resume: auto", "resume: unknown key; this is an option of the command line: --resume"),
    ("zzz: 1", "zzz: unknown key; `python -m hvdtrain.config` lists all keys"),
    ("lr: {warmup: 1}", "lr.warmup: unknown key; did you mean lr.warmup_steps?"),
    (
        "lr: {zzz: 1}",
        "lr.zzz: unknown key; the keys here are scaling, base_batch, warmup_steps, schedule",
    ),
    ("lr: 0.1", "lr: must be a mapping, not 0.1; the learning rate itself is optimizer.lr"),
    ("lr: null", "lr: must be a mapping, not null"),
    ("optimizer: Adam", "optimizer: must be a mapping, not 'Adam'; write {name: Adam, lr: 0.05}"),
    ("optimizer: {lr: '0.05'}", "optimizer.lr: must be a number of at least 0, or null, not '0.05'; remove the quotes"),
    ("optimizer: {lr: true}", "optimizer.lr: must be a number of at least 0, or null, not true"),
    ("optimizer: {lr: .inf}", "optimizer.lr: must be a number of at least 0, or null, not .inf"),
    ("optimizer: {lr: .nan}", "optimizer.lr: must be a number of at least 0, or null, not .nan"),
    ("optimizer: {lr: -1e-3}", "optimizer.lr: must be a number of at least 0, or null, not -0.001"),
    ("optimizer: {name: 3}", "optimizer.name: must be text, not 3"),
    ("epochs: true", "epochs: must be a whole number of at least 1, or null, not true"),
    ("epochs: 0", "epochs: must be a whole number of at least 1, or null, not 0"),
    ("epochs: 3.0", "epochs: must be a whole number of at least 1, or null, not 3.0; write 3"),
    ("epochs: 2.5", "epochs: must be a whole number of at least 1, or null, not 2.5"),
    ("epochs: none", "epochs: must be a whole number of at least 1, or null, not 'none'; write null"),
    ("batch_size: '64'", "batch_size: must be a whole number of at least 1, or null, not '64'; remove the quotes"),
    ("accumulate: null", "accumulate: must be a whole number of at least 1, not null"),
    ("seed: -1", "seed: must be a whole number of at least 0, not -1"),
    ("shuffle: no", "shuffle: must be true or false, not 'no'; write false"),
    ("shuffle: 'on'", "shuffle: must be true or false, not 'on'; write true"),
    ("compile: 1", "compile: must be true or false, not 1"),
    ("compression: null", "compression: must be one of none, fp16, bf16, powersgd, not null; write none"),
    ("compression: fp61", "compression: must be one of none, fp16, bf16, powersgd, not 'fp61'; did you mean fp16?"),
    ("precision: FP16", "precision: must be one of fp32, bf16, fp16, not 'FP16'; did you mean fp16?"),
    ("backend: dpp", "backend: must be one of ddp, horovod, not 'dpp'; did you mean ddp?"),
    (
        "backend: gloo",
        (
            "backend: gloo is a transport, not a backend; backends are ddp and horovod. Use `backend: ddp` with "
            "`transport: gloo` (on the command line: --backend ddp --set transport=gloo)"
        ),
    ),
    (
        "transport: horovod",
        (
            "transport: horovod is a backend, not a transport; use `backend: horovod` (on the command line: "
            "--backend horovod)"
        ),
    ),
    (
        "device: cuda:1",
        (
            "device: must be one of auto, cpu, cuda, not 'cuda:1'; write cuda: each rank takes the device of its local "
            "rank"
        ),
    ),
    ("clip_norm: 0", "clip_norm: must be a number above 0, or null, not 0"),
    ("output: ''", "output: must be text, not ''"),
    ("task_options: [1]", "task_options: must be a mapping, not [1]"),
    ("checkpoint: {best: accuracy}", "checkpoint.best: must be a mapping, or null, not 'accuracy'"),
    ("checkpoint: {best: {metric: a}}", "checkpoint.best.mode: this key is required (one of max, min)"),
    (
        "checkpoint: {best: {metric: a, mode: maximum}}",
        "checkpoint.best.mode: must be one of max, min, not 'maximum'; did you mean max?",
    ),
    (
        "{backend: horovod, compression: bf16}",
        (
            "compression: bf16 cannot be used with the horovod backend: Horovod 0.28.1 has no bfloat16; use fp16 or "
            "none, or the ddp backend"
        ),
    ),
    (
        "{backend: horovod, compression: powersgd}",
        (
            "compression: powersgd cannot be used with the horovod backend: Horovod 0.28.1 reduces each gradient as it "
            "is and has no hook for it; use fp16 or none, or the ddp backend"
        ),
    ),
    (
        "epochs: null",
        "epochs: epochs and max_steps are both null, so the run would never end; give one of them",
    ),
    (
        "{device: cpu, transport: nccl}",
        "transport: nccl carries CUDA tensors only, and device is cpu; use transport gloo, or device cuda",
    ),
    (
        "{batch_size: null, lr: {scaling: sqrt}}",
        "lr: scaling sqrt needs a batch size, and batch_size is null; use scaling none",
    ),
    ("epochs: 1\nepochs: 2", "epochs: given twice, first in line 1; remove one"),
    ("1: 2", "keys are text, not 1; put it in quotes"),
    (
        "epochs: !!python/name:os.system ''",
        "epochs: the tag tag:yaml.org,2002:python/name:os.system is not supported; remove it",
    ),
    ("epochs: !!int abc", "epochs: 'abc' is not of type int"),
    ("lr: &a [*a]", "lr.0: the alias contains itself"),
]


@pytest.mark.parametrize(("text", "expected"), ONE_LINE, ids=[text for text, _ in ONE_LINE])
def test_message_of_one_fault(message, text, expected):
    # The fault stands in the last line of the file; flow mappings take the task along.
    body = text[:-1] + ", task: 'a.b:C'}\n" if text.startswith("{") else f"{text}\ntask: a.b:C\n"
    line = 1 + body.rstrip("\n").count("\n") - (0 if text.startswith("{") else 1)
    assert message(body) == f"job.yaml, line {line}: {expected}"


def test_lines_are_those_of_the_key(message):
    text = """\
# a comment
task: a.b:C

lr:
  # another
  base_batch: 8

  schedule: cosin
"""
    assert message(text) == (
        "job.yaml, line 8: lr.schedule: must be one of constant, cosine, linear, not 'cosin'; did you mean cosine?"
    )


def test_all_faults_are_listed_in_the_order_of_the_lines(message):
    text = "backend: horovod\ncompression: bf16\nepoch: 3\nshuffle: 3\n"
    assert message(text, ["seed=x"]) == (
        "5 errors in the configuration:\n"
        "  job.yaml: task: this key is required, such as examples/mnist/task.py:Mnist\n"
        "  --set seed=x: seed: must be a whole number of at least 0, not 'x'\n"
        "  job.yaml, line 2: compression: bf16 cannot be used with the horovod backend: Horovod 0.28.1 has no "
        "bfloat16; use fp16 or none, or the ddp backend\n"
        "  job.yaml, line 3: epoch: unknown key; did you mean epochs?\n"
        "  job.yaml, line 4: shuffle: must be true or false, not 3"
    )


def test_all_faults_of_the_text_are_listed(message):
    assert message("task: a.b:C\nlr: {base_batch: 1, base_batch: 2}\n? [1]\n: 2\nnull: 1\n") == (
        "3 errors in the configuration:\n"
        "  job.yaml, line 2: lr.base_batch: given twice, first in line 2; remove one\n"
        "  job.yaml, line 3: keys are text, not a mapping or list; put it in quotes\n"
        "  job.yaml, line 5: keys are text, not null; put it in quotes"
    )


@pytest.mark.parametrize("text", ["task: 3", "task: task.py", "task: 'a b:'", "task: file.py:3x", "task: ':Mnist'"])
def test_task_has_a_colon_and_a_class(message, text):
    value = text.removeprefix("task: ")
    shown = value if value.startswith("'") or value == "3" else f"'{value}'"
    assert message(text) == (
        f"job.yaml, line 1: task: must be path/to/file.py:Class or package.module:Class, not {shown}"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "task: a.b:C\nlr:\n\tbase_batch: 1\n",
            "job.yaml, line 3, column 1: not valid YAML: the line is indented with a tab; YAML allows spaces only",
        ),
        (
            "task: a.b:C\noutput: a: b\n",
            (
                "job.yaml, line 2, column 10: not valid YAML: mapping values are not allowed here (wrong indentation, "
                "or text with `: ` in it that needs quotes)"
            ),
        ),
        (
            "task: a.b:C\nlr: {base_batch: 1\nseed: 1\n",
            "job.yaml, line 3, column 5: not valid YAML: expected ',' or '}', but got ':'",
        ),
        (
            "task: a.b:C\n---\ntask: a.b:D\n",
            "job.yaml, line 2, column 1: not valid YAML: a second document begins here (`---`); a job file has one",
        ),
        ("task: *who\n", "job.yaml, line 1, column 7: not valid YAML: found undefined alias 'who'"),
        ("", "job.yaml: is empty; a job file needs at least `task: path/to/file.py:Class`"),
        ("# only a comment\n", "job.yaml: is empty; a job file needs at least `task: path/to/file.py:Class`"),
        ("- a\n", "job.yaml, line 1: the file is a list; expected keys, such as `task: path/to/file.py:Class`"),
        (
            "examples\n",
            (
                "job.yaml, line 1: the file is the single value 'examples'; expected keys, such as "
                "`task: path/to/file.py:Class`"
            ),
        ),
        (b"\x89PNG\xff", "job.yaml: not UTF-8 text (byte 0); is this a YAML file?"),
    ],
)
def test_files_that_are_no_job_file(message, text, expected):
    assert message(text) == expected


def test_forbidden_characters(message):
    assert message("task: a.b:C\nseed: \x00\n").startswith("job.yaml: not valid YAML: unacceptable character")


def test_missing_file_folder_and_their_neighbours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "large.yaml").write_text("task: a.b:C\n")
    for path, expected in [
        ("jobs/larg.yaml", "jobs/larg.yaml: no such file; did you mean jobs/large.yaml?"),
        ("jobs/qqq.yaml", f"jobs/qqq.yaml: no such file (the working directory is {tmp_path})"),
        (
            "job/a.yaml",
            f"job/a.yaml: no such file (there is no folder job either; the working directory is {tmp_path})",
        ),
        ("jobs", "jobs: is a folder, not a YAML file; it holds large.yaml"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value) == expected


def test_missing_task_file(message, tmp_path):
    (tmp_path / "task.py").touch()
    assert message("seed: 2\ntask: tsk.py:Mnist\n") == (
        f"job.yaml, line 2: task: no file tsk.py in {tmp_path} and the folders above it; did you mean task.py?"
    )
    assert message("task: a.b:C\n", ["task=/nowhere/task.py:Mnist"]) == (
        "--set task=/nowhere/task.py:Mnist: task: no file /nowhere/task.py"
    )
