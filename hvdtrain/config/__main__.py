"""`python -m hvdtrain.config` prints every key of the job file."""

from __future__ import annotations

import textwrap

from hvdtrain.config.reference import describe_keys


def main() -> None:
    """Print the reference as YAML with comments."""
    for doc in describe_keys():
        indent = "  " * doc.key.count(".")
        default = "(required)" if doc.default is None else doc.default
        print(f"{indent}{doc.key.rpartition('.')[2]}: {default}    # {doc.accepts}")
        print(textwrap.indent(textwrap.fill(doc.text, 100 - len(indent)), f"{indent}    "))


if __name__ == "__main__":
    main()
