"""What every script does: flags from a dataclass, and errors as one sentence and an exit code. No torch here."""

import ast
import contextlib
import dataclasses
import faulthandler
import inspect
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, NamedTuple, NoReturn, TextIO, TypeVar, Union, get_args, get_origin, get_type_hints

from konkanivani.base.config import OLD_NAMES
from konkanivani.base.console import say
from konkanivani.base.errors import KonkaniVaniError, ReportedByOtherRank, ResourceError

Flags = TypeVar("Flags")

WIDTH = 80
TEXT_COLUMN = 28
TYPE_NAMES = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH", bool: ""}
PATH_NAME = re.compile(
    r"(manifests?|roots?|_dir|resume|init_from|checkpoints?|pretrained|language_model|html|output|bundle|onnx|int8|"
    r"whisper|adapter|references|hypotheses|compare|table|text|held_out|sentences)$"
)
# A line of a description that is indented, or that begins with one of these, is an example and is never wrapped.
EXAMPLE = re.compile(r"\s{2,}|python3 |torchrun |\./")
STDERR = 2
GRACE_SECONDS = 1.0  # that a rank with nothing to say leaves the others to say it


def read_flags(
    kind: type[Flags],
    arguments: list[str],
    default: Flags | None = None,
    shown: type | None = None,
    common: Sequence[str] = (),
) -> Flags:
    """Return a `kind` from the command line, fields that are not given from `default`; nested fields have no prefix.

    An unknown or mistyped flag ends the process with exit code 2 and the nearest name. `--help` prints the script's
    docstring and the flags of `shown`, or of `kind`: those in `common`, if any, or all after `--help all`.
    """
    if {"-h", "--help"} & set(arguments):
        _print_help(shown or kind, None if shown else default, arguments, common)
    import tyro

    try:
        return tyro.cli(
            kind,
            args=list(map(with_new_name, arguments)),
            default=tyro.MISSING_NONPROP if default is None else default,
            description=(sys.modules["__main__"].__doc__ or "").strip(),
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff),
            use_underscores=True,
        )
    except BrokenPipeError:
        sys.exit(_leave_pipe())


def _print_help(kind: type, default: object, arguments: list[str], common: Sequence[str]) -> NoReturn:
    """Print the help of `kind` and end the process; `all` after `--help` lists every flag."""
    place = next(index for index, word in enumerate(arguments) if word in ("-h", "--help"))
    show_all = arguments[place + 1 : place + 2] == ["all"]
    description = (sys.modules["__main__"].__doc__ or "").strip()
    try:
        print(format_help(kind, default, description, common, show_all), flush=True)
    except BrokenPipeError:  # the reader of the pipe, such as head, has ended
        sys.exit(_leave_pipe())
    sys.exit(0)


def with_new_name(flag: str) -> str:
    """A flag, with its value or without; where it has been renamed (OLD_NAMES), under its name of today."""
    return re.sub(r"^--([\w-]+)", lambda found: "--" + OLD_NAMES.get(found[1].replace("-", "_"), found[1]), flag)


def run_script(action: Callable[[], str]) -> int:
    """Prints what `action` returns, if anything; the exit code, after a sentence on stderr where it failed."""
    # Python's signal handlers run on a stack of their own, and a crash in native code says where it was. oneDNN before
    # 3.11.2 lets the stack register point into its heap while it multiplies (its pull request 4855): what the system
    # puts on the stack for a handler would overwrite what lies there.
    if not faulthandler.is_enabled():
        faulthandler.enable(STDERR)
    try:
        if text := action():
            say(text)
        return 0
    except KonkaniVaniError as error:
        with contextlib.suppress(OSError):  # the code says it too where the disk that stderr goes to is full
            if str(error):  # else another rank has told it
                say(error, sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return _leave_pipe()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error) or "the system refused to allocate more").splitlines()[0]
        say(
            f"Out of memory: {reason} Use a smaller --batch_size with more --gradient_accumulation_steps (the "
            "result is the same), --gradient_checkpointing always, a lower --max_duration, or a smaller "
            "--preset.",
            sys.stderr,
        )
        return ResourceError.exit_code


def _leave_pipe() -> int:
    """The exit code where the reader of stdout, such as head, has ended; what is left is not flushed into the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


@contextlib.contextmanager
def silence_output() -> Iterator[None]:
    """Drops what the block writes on stdout and stderr."""
    with open(os.devnull, "w") as out, open(os.devnull, "w") as err:  # two, so that they can be told apart
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield


@contextlib.contextmanager
def print_on_local_rank0() -> Iterator[None]:
    """What the block writes, and what is wrong in it, is told by the first rank of those that torchrun started here.

    For what comes before the ranks can speak to each other: they were all given the same command line.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        yield
        return
    try:
        with silence_output():
            yield
    except (KonkaniVaniError, SystemExit) as error:
        time.sleep(GRACE_SECONDS)  # torchrun ends all ranks when it sees the first one end, which should have spoken
        raise ReportedByOtherRank(error.exit_code if isinstance(error, KonkaniVaniError) else error.code or 0) from None


def end_script(code: int) -> NoReturn:
    """Ends the process; after a signal, and as one of torchrun's ranks, without Python freeing what it holds.

    That takes a second, and who sends a signal counts the seconds until SIGKILL. In a rank gloo's threads outlive
    dist.destroy_process_group where weights were sharded, and 1 of 48 such ends was an abort (PyTorch's issue
    190489). What was to be saved is saved.
    """
    if code > 128 or "RANK" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


class _LossyStream:
    """A stream that loses what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


@contextlib.contextmanager
def ignore_lost_output() -> Iterator[None]:
    """Lets work go on that matters more than what it prints: into a file on a full disk, to a reader who has gone."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_LossyStream, streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream in streams:
            try:
                stream.flush()
            except OSError:
                # What is stuck in it would fail once more at the exit, and change the exit code.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a CPU or a GPU; by name, so that torch need not be imported."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # The allocator of a CPU, C++, the CUDA driver, then cuBLAS, cuFFT and cuDNN (..._ALLOCATION_FAILED from 9 on).
    signs = ("can't allocate memory", "bad_alloc", "CUDA error: out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED")
    return any(sign in str(error) for sign in signs)


# Text of --help.


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
