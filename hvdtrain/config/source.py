"""YAML text to plain values, with the line of every key.

The types of plain scalars follow YAML 1.2's core schema and not PyYAML's YAML 1.1, whose readings are traps in a
job file: `1e-3` is a number (1.1: text), `no`, `off` and `on` are text (1.1: booleans), `010` is ten (1.1: eight),
`1:30` is text (1.1: ninety) and dates are text.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from hvdtrain.config.problems import KeyPath, Origins, Problem, raise_problems

_STR, _NULL, _BOOL, _INT, _FLOAT, _MERGE = (
    f"tag:yaml.org,2002:{name}" for name in ("str", "null", "bool", "int", "float", "merge")
)
# YAML 1.2.2, section 10.3.2 (core schema); underscores between digits are allowed as in Python, 60_000.
_SCALARS = (
    (_NULL, re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    (_BOOL, re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    (_INT, re.compile(r"(?:[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (
        _FLOAT,
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
    (_MERGE, re.compile(r"<<$"), ["<"]),
)


_Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]


def _core_schema(and_then: _Resolvers | None = None) -> _Resolvers:
    """PyYAML's table of patterns by first character, with the core schema first."""
    table: _Resolvers = {}
    for tag, pattern, first_characters in _SCALARS:
        for character in first_characters:
            table.setdefault(character, []).append((tag, pattern))
    for character, patterns in (and_then or {}).items():
        table.setdefault(character, []).extend(patterns)
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _core_schema()


class _Dumper(yaml.SafeDumper):
    # Both readings, so that text which is a number or a boolean for either kind of reader is written in quotes.
    yaml_implicit_resolvers = _core_schema(yaml.SafeLoader.yaml_implicit_resolvers)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def parse(text: str, origins: Origins) -> Any:
    """Read one YAML document and note in `origins` the line of every key.

    Returns:
        Mappings, lists, text, numbers, booleans, None; an empty document is None.

    Raises:
        ConfigError: not YAML (with line and column), or keys given twice, keys that are not text, tags, aliases
            that contain themselves; all of the latter are listed at once.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise_problems([_syntax_problem(error, text, origins)])
    except yaml.YAMLError as error:  # characters that YAML forbids; the message has no mark
        raise_problems([Problem(origins.file, "", f"not valid YAML: {error}")])
    problems: list[Problem] = []
    value = None if node is None else _value(node, (), origins, problems, ())
    raise_problems(problems)
    return value


def dump(value: Any) -> str:
    """YAML text that `parse` reads as the same value; mappings keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False)


def _syntax_problem(error: yaml.MarkedYAMLError, text: str, origins: Origins) -> Problem:
    mark = error.problem_mark or error.context_mark
    what = error.problem or error.context or "cannot be read"
    if mark is None:
        return Problem(origins.file, "", f"not valid YAML: {what}")
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        what = "the line is indented with a tab; YAML allows spaces only"
    elif "expected a single document" in (error.context or ""):
        what = "a second document begins here (`---`); a job file has one"
    elif "mapping values are not allowed" in what:
        what += " (wrong indentation, or text with `: ` in it that needs quotes)"
    where = f"{origins.place(mark.line + 1)}, column {mark.column + 1}" if origins.file else ""
    return Problem(where, "", f"not valid YAML: {what}")


def _value(
    node: yaml.Node, path: KeyPath, origins: Origins, problems: list[Problem], around: tuple[yaml.Node, ...]
) -> Any:
    if any(node is outer for outer in around):
        problems.append(origins.problem(path, "the alias contains itself"))
        return None
    around = (*around, node)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, path, origins, problems)
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        values = []
        for index, item in enumerate(node.value):
            here = (*path, str(index))
            origins.line(here, item.start_mark.line + 1)
            values.append(_value(item, here, origins, problems, around))
        return values
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        return _mapping(node, path, origins, problems, around)
    problems.append(origins.problem(path, f"the tag {node.tag} is not supported; remove it"))
    return None


def _mapping(
    node: yaml.MappingNode, path: KeyPath, origins: Origins, problems: list[Problem], around: tuple[yaml.Node, ...]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    merged: list[yaml.Node] = []
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        number = key_node.start_mark.line + 1
        if key_node.tag == _MERGE:
            merged.extend(value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node])
            continue
        if key_node.tag != _STR:
            shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a mapping or list"
            text = f"keys are text, not {shown or 'nothing'}; put it in quotes"
            problems.append(Problem(origins.place(number), ".".join(path), text, number))
            continue
        name = str(key_node.value)
        here = (*path, name)
        origins.line(here, number)
        if name in seen:
            first = f", first in line {seen[name]}" if origins.file else ""
            problems.append(origins.problem(here, f"given twice{first}; remove one"))
            continue
        seen[name] = number
        values[name] = _value(value_node, here, origins, problems, around)
    for source in merged:
        if not isinstance(source, yaml.MappingNode):
            problems.append(origins.problem(path, "`<<` merges mappings only"))
            continue
        scratch = Origins(origins.file)
        for name, value in _mapping(source, path, scratch, problems, around).items():
            if name not in values:
                values[name] = value
                origins.adopt((*path, name), scratch)
    return values


def _scalar(node: yaml.ScalarNode, path: KeyPath, origins: Origins, problems: list[Problem]) -> Any:
    text, tag = str(node.value), node.tag
    try:
        if tag == _STR:
            return text
        if tag == _NULL:
            return None
        if tag == _BOOL:
            return {"true": True, "false": False}[text.lower()]
        if tag == _INT:
            # Base 0 refuses 010; the core schema reads it as ten.
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if tag == _FLOAT:
            # Python writes YAML's .inf and .nan without the dot.
            return float(re.sub(r"\.(?=[iInN])", "", text))
    except (KeyError, ValueError):  # an explicit tag on other text: !!int abc
        problems.append(origins.problem(path, f"{text!r} is not of type {tag.rpartition(':')[2]}"))
        return None
    problems.append(origins.problem(path, f"the tag {tag} is not supported; remove it"))
    return None


def dump_short(value: Any) -> str:
    """The same on one line: `{name: SGD, lr: 0.05}`."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1e9, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")
