"""Files of the repository that its scripts and texts name are there."""

import re
from pathlib import Path

TOP = Path(__file__).parents[3]
# In the images the examples lie under /examples.
PATH = re.compile(r"(?<![\w./-])/?((?:examples|docker|tests|\.ci|\.setup)/[\w/.-]*[\w-])")
# What runs make.
MADE = re.compile(r"(^|/)(data|runs|wheelhouse)(/|$)")


def test_every_path_that_is_named_exists():
    texts = [TOP / "README.md", TOP / "tests/run.sh"]
    for folder in (".ci", ".setup", "docker", "examples"):
        texts += [file for file in (TOP / folder).rglob("*") if file.is_file() and not MADE.search(str(file.parent))]
    assert TOP / "docker/cluster" in texts
    gone = []
    for file in texts:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        gone += [
            (file.name, path) for path in PATH.findall(text) if not MADE.search(path) and not (TOP / path).exists()
        ]
    assert gone == []
