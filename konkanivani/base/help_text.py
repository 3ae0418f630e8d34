"""Format the text of `--help` from a dataclass of flags and the strings under its fields. No torch here."""

import ast
import dataclasses
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

WIDTH = 80
TEXT_COLUMN = 28
TYPE_NAMES = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH", bool: ""}
PATH_NAME = re.compile(
    r"(manifests?|roots?|_dir|resume|init_from|checkpoints?|pretrained|language_model|html|output|bundle|onnx|int8|"
    r"whisper|adapter|references|hypotheses|compare|table|text|held_out|sentences)$"
)
# A line of a description that is indented, or that begins with one of these, is an example and is never wrapped.
EXAMPLE = re.compile(r"\s{2,}|python3 |torchrun |\./")


class HelpFlag(NamedTuple):
    """One flag, as `--help` lists it."""

    name: str
    group: str
    values: str
    text: str
    is_positional: bool

    def lines(self) -> str:
        """Return the flag with its text beside it, wrapped to WIDTH columns."""
        head = f"  {self.values if self.is_positional else f'--{self.name} {self.values}'.rstrip()}"
        text = textwrap.wrap(self.text, WIDTH - TEXT_COLUMN, break_long_words=False, break_on_hyphens=False)
        if len(head) > TEXT_COLUMN - 2:
            text.insert(0, head)
        else:
            text[:1] = [head.ljust(TEXT_COLUMN) + (text[0] if text else "")]
        return "\n".join([text[0], *(" " * TEXT_COLUMN + line for line in text[1:])])


def format_help(kind: type, default: object, description: str, common: Sequence[str], show_all: bool) -> str:
    """Return the help of a script whose flags are the fields of `kind`.

    With `common`, only these flags are listed, in this order, unless `show_all` is set; a last line names `--help all`.
    """
    flags = flags_of(kind, default)
    positional = " ".join(flag.values for flag in flags if flag.is_positional)
    usage = f"usage: {_program()} {positional + ' ' if positional else ''}[--FLAG VALUE ...]"
    sections = [usage, wrap_description(description)]
    if common and not show_all:
        by_name = {flag.name: flag for flag in flags}
        sections.append(_section("common flags", [by_name[name] for name in common]))
        sections.append(f"All {len(flags)} flags: --help all")
    else:
        groups = dict.fromkeys(flag.group for flag in flags)
        sections += [_section(group, [flag for flag in flags if flag.group == group]) for group in groups]
    return "\n\n".join(section for section in sections if section)


def wrap_description(text: str) -> str:
    """Return a docstring with its paragraphs wrapped to WIDTH columns and its examples as they are, indented by 4."""
    parts: list[tuple[bool, list[str]]] = []  # (is an example, its lines)
    is_new, continues = True, False
    for line in text.strip().splitlines():
        if not line.strip():
            is_new, continues = True, False
            continue
        is_example = continues or EXAMPLE.match(line) is not None
        continues = is_example and line.endswith("\\")
        if is_new or parts[-1][0] != is_example:
            parts.append((is_example, []))
        parts[-1][1].append(line.rstrip())
        is_new = False
    return "\n\n".join(_example(lines) if is_example else _wrapped(lines) for is_example, lines in parts)


def _example(lines: list[str]) -> str:
    return textwrap.indent(textwrap.dedent("\n".join(lines)), " " * 4)


def _wrapped(lines: list[str]) -> str:
    return textwrap.fill(" ".join(lines), WIDTH, break_long_words=False, break_on_hyphens=False)


def flags_of(kind: type, default: object = None) -> list[HelpFlag]:
    """Return the flags of a dataclass and of the dataclasses in its fields, in the order of declaration."""
    found: list[HelpFlag] = []
    hints = get_type_hints(kind, include_extras=True)
    plain_hints = get_type_hints(kind)
    texts = field_texts(kind)
    for field in dataclasses.fields(kind):
        value = _default_of(field, default)
        if dataclasses.is_dataclass(plain_hints[field.name]):
            found += flags_of(plain_hints[field.name], value)
            continue
        metadata = getattr(hints[field.name], "__metadata__", ())
        is_positional = any(repr(item) == "Positional" for item in metadata)
        metavar = next((item.metavar for item in metadata if getattr(item, "metavar", None)), None)
        values = metavar or value_names(plain_hints[field.name])
        if is_positional and metavar is None:
            values = field.name.upper()
        elif PATH_NAME.search(field.name):
            values = values.replace("STR", "PATH")
        text = with_default(" ".join(texts.get(field.name, "").split()), value)
        if len(values) > WIDTH - 20:
            values, text = "NAME", f"{text} One of: {', '.join(get_args(plain_hints[field.name]))}."
        found.append(HelpFlag(field.name, _group_of(kind), values, text, is_positional))
    return found


@cache
def field_texts(kind: type) -> dict[str, str]:
    """Return the string under each field of a dataclass and of its bases."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for statement, after in zip(body, body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    texts[statement.target.id] = str(after.value.value)
    return texts


def value_names(hint: object) -> str:
    """Return what a flag of this type takes, such as `INT|auto` or `{cosine,inverse_sqrt}`; nothing for a switch."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        names = [value_names(kind) for kind in kinds]
        return names[0] if len(names) == 1 else "|".join(name.strip("{}") for name in names)
    if origin is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if origin is tuple:
        return f"{value_names(get_args(hint)[0])} ..."
    return TYPE_NAMES.get(hint, "VALUE") if isinstance(hint, type) else "VALUE"


def _default_of(field: dataclasses.Field, default: object) -> object:
    if default is not None:
        return getattr(default, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def with_default(text: str, value: object) -> str:
    """Return the help of a flag with its default: "(auto: 3)" becomes "(default auto: 3)", "(None: 3)" "(default: 3)".

    A text that does not explain its default gets it at the end, unless it is off or empty.
    """
    if value is dataclasses.MISSING:
        return f"{text} (required)"
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    name = f"{value:g}" if isinstance(value, float) else str(value)
    shown = "default" if value is None else f"default {name}"
    explained = re.sub(rf"([(;] ?){re.escape(name)}:", rf"\g<1>{shown}:", text, count=1)
    if explained != text or value in (None, False, ""):
        return explained
    return f"{text} (default: {value})"


def _group_of(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0].rstrip(".")


def _section(title: str, flags: Sequence[HelpFlag]) -> str:
    return "\n".join([f"{title}:", *(flag.lines() for flag in flags)])


def _program() -> str:
    path = os.path.relpath(sys.argv[0]) if os.path.isabs(sys.argv[0]) else sys.argv[0]
    return sys.argv[0] if path.startswith("..") else path
