"""Command line of every script: flags from a dataclass, help, errors as one sentence and an exit code.

Does not import torch.
"""

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
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, NamedTuple, NoReturn, TextIO, TypeVar, Union, get_args, get_origin, get_type_hints

from konkanivani.config import IMPORTED, OLD_NAMES
from konkanivani.console import say
from konkanivani.errors import KonkaniVaniError, ReportedByOtherRank, ResourceError

Flags = TypeVar("Flags")


class HelpSection(NamedTuple):
    """Title and flags of one section of `--help`."""

    title: str
    names: tuple[str, ...]


WIDTH = 80
TEXT_COLUMN = 28
TYPE_NAMES = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH", bool: ""}
PATH_NAME = re.compile(
    r"(manifests?|roots?|_dir|resume|init_from|checkpoints?|pretrained|language_model|html|output|bundle|onnx|int8|"
    r"whisper|adapter|references|hypotheses|compare|table|text|held_out|sentences)$"
)
# Lines of a description that match this are examples and are never wrapped.
EXAMPLE = re.compile(r"\s{2,}|python3 |torchrun |konkanivani |\./")
# Subcommands of `konkanivani`, and the scripts in training_scripts/ that run the same functions.
SCRIPTS = {
    "train": "train_konkanivani_asr.py",
    "prepare": "prepare_data.py",
    "builtin": "prepare_builtin_corpus.py",
    "inspect": "inspect_data.py",
    "plan": "plan_memory.py",
    "evaluate": "evaluate_konkanivani_asr.py",
    "transcribe": "transcribe.py",
    "correct": "correct.py",
    "listen": "listen.py",
    "serve": "serve.py",
    "export": "export_asr.py",
    "publish": "publish_model.py",
    "import": "import_asr.py",
    "average": "average_checkpoints.py",
    "compare": "compare_models.py",
    "lm": "train_language_model.py",
}
STDERR = 2
GRACE_SECONDS = 1.0  # delay of a rank that prints nothing, so that the reporting rank prints first


def read_flags(
    kind: type[Flags],
    arguments: list[str],
    default: Flags | None = None,
    shown: type | None = None,
    common: Sequence[HelpSection] = (),
    hidden: Collection[str] = (),
    description: str | None = None,
) -> Flags:
    """Return a `kind` from the command line; missing fields are from `default`, and nested fields have no prefix.

    An unknown or mistyped flag ends the process with exit code 2 and the nearest name. `--help` prints the
    `description` (None: the docstring of the running script) and the flags of `shown`, or of `kind`: those in `common`,
    if any, or all of them after `--help all`. Flags in `hidden` are accepted, but not printed.
    """
    text = with_command_names(description or sys.modules["__main__"].__doc__ or "").strip()
    if {"-h", "--help"} & set(arguments):
        _print_help(shown or kind, None if shown else default, arguments, common, hidden, text)
    # Imported late: --help does not need it.
    import tyro

    try:
        return tyro.cli(
            kind,
            args=list(map(with_new_name, arguments)),
            default=tyro.MISSING_NONPROP if default is None else default,
            description=text,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff),
            use_underscores=True,
        )
    except BrokenPipeError:
        sys.exit(_leave_pipe())


def _print_help(
    kind: type,
    default: object,
    arguments: list[str],
    common: Sequence[HelpSection],
    hidden: Collection[str],
    description: str,
) -> NoReturn:
    """Print the help of `kind` and end the process; `all` after `--help` lists every flag."""
    place = next(index for index, word in enumerate(arguments) if word in ("-h", "--help"))
    show_all = arguments[place + 1 : place + 2] == ["all"]
    try:
        print(format_help(kind, default, description, common, show_all, hidden), flush=True)
    except BrokenPipeError:  # the reader of the pipe, such as head, has ended
        sys.exit(_leave_pipe())
    sys.exit(0)


def command_line_of(command: str) -> str:
    """Return how to start a subcommand in the way in which this process was started: installed, or from a checkout."""
    program, _, subcommand = sys.argv[0].rpartition(" ")
    if program.endswith("konkanivani") and subcommand in SCRIPTS:
        return f"{program} {command}"
    return f"python3 training_scripts/{SCRIPTS[command]}"


def with_command_names(text: str) -> str:
    """Return the text with `konkanivani COMMAND` written as this process was started (`command_line_of`)."""
    names = "|".join(SCRIPTS)
    return re.sub(rf"(?<![\w./])konkanivani ({names})\b", lambda match: command_line_of(match[1]), text)


def with_new_name(flag: str) -> str:
    """Return a flag, with or without its value, under its current name (OLD_NAMES)."""
    return re.sub(r"^--([\w-]+)", lambda match: "--" + OLD_NAMES.get(match[1].replace("-", "_"), match[1]), flag)


def run_script(action: Callable[[], str]) -> int:
    """Print the result of `action`, if any, and return the exit code; after an error, print one sentence on stderr."""
    # With faulthandler a crash in native code prints a traceback, and Python's signal handlers run on an alternate
    # stack. The latter is needed: oneDNN before 3.11.2 points the stack register into its heap during a matrix product
    # (oneDNN pull request 4855), and a signal frame pushed there would overwrite data.
    if not faulthandler.is_enabled():
        faulthandler.enable(STDERR)
    try:
        if text := action():
            say(text)
        return 0
    except KonkaniVaniError as error:
        with contextlib.suppress(OSError):  # stderr on a full disk: the exit code still reports the error
            if str(error):  # empty if another rank reports it
                say(with_command_names(str(error)), sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return _leave_pipe()
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # Ctrl-C may have ended the reader of stderr too
            print("Interrupted.", file=sys.stderr, flush=True)
        # 128 + SIGINT, as shells report it.
        return 130
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # CUDA's message continues with allocator statistics: keep its first line.
        reason = (str(error) or "the system refused to allocate more").splitlines()[0]
        say(
            f"Out of memory: {reason} Use a smaller --batch_size with more --gradient_accumulation_steps (the "
            "result is the same), --gradient_checkpointing always, a lower --max_duration, or a smaller "
            "--preset.",
            sys.stderr,
        )
        return ResourceError.exit_code


def _leave_pipe() -> int:
    """Return the exit code for a stdout closed by its reader, such as head, and discard unflushed output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # 128 + SIGPIPE.
    return 141


@contextlib.contextmanager
def silence_output() -> Iterator[None]:
    """Discard the output of the block on stdout and stderr."""
    with open(os.devnull, "w") as out, open(os.devnull, "w") as err:  # two, as stdout and stderr differ
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield


@contextlib.contextmanager
def print_on_local_rank0() -> Iterator[None]:
    """Discard the output of the block, except on the first local rank, which also reports its errors.

    For code that runs before the process group exists: all ranks have the same command line, hence the same errors.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        yield
        return
    try:
        with silence_output():
            yield
    except (KonkaniVaniError, SystemExit) as error:
        time.sleep(GRACE_SECONDS)  # torchrun kills all ranks when one ends: let the first one report
        raise ReportedByOtherRank(_exit_code(error)) from None


def _exit_code(error: KonkaniVaniError | SystemExit) -> int:
    """Return the exit code of a process that ends with this error."""
    if isinstance(error, KonkaniVaniError):
        return error.exit_code
    # sys.exit() means 0, and sys.exit("message") means 1.
    return 1 if isinstance(error.code, str) else error.code or 0


def end_script(code: int) -> NoReturn:
    """End the process; after a signal or as a rank of torchrun, without Python's finalization.

    Everything to be saved must be saved already.
    """
    # Finalization takes a second, and after a signal the time until SIGKILL is limited. In a rank, gloo's threads
    # outlive dist.destroy_process_group if weights were sharded, and 1 of 48 such exits aborted (PyTorch issue 190489).
    if code > 128 or "RANK" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


class _LossyStream:
    """Text stream that ignores write errors."""

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
    """Continue the block when output cannot be written: to a file on a full disk, or to a closed pipe.

    For work that matters more than its output.
    """
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
                # The buffered rest would fail again at exit, and change the exit code.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is an out-of-memory error of a CPU or a GPU; works without importing torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # Of PyTorch's CPU allocator, C++, the CUDA driver, cuBLAS, cuFFT and cuDNN (..._ALLOCATION_FAILED since cuDNN 9).
    signs = ("can't allocate memory", "bad_alloc", "CUDA error: out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED")
    return any(sign in str(error) for sign in signs)


# Text of --help.


class HelpFlag(NamedTuple):
    """One flag in the text of `--help`."""

    name: str
    group: str
    values: str
    text: str
    is_positional: bool

    def lines(self) -> str:
        """Return the flag and its text in two columns, wrapped to WIDTH columns."""
        head = f"  {self.values if self.is_positional else f'--{self.name} {self.values}'.rstrip()}"
        text = textwrap.wrap(self.text, WIDTH - TEXT_COLUMN, break_long_words=False, break_on_hyphens=False)
        if len(head) > TEXT_COLUMN - 2:
            text.insert(0, head)
        else:
            text[:1] = [head.ljust(TEXT_COLUMN) + (text[0] if text else "")]
        return "\n".join([text[0], *(" " * TEXT_COLUMN + line for line in text[1:])])


def format_help(
    kind: type,
    default: object,
    description: str,
    common: Sequence[HelpSection],
    show_all: bool,
    hidden: Collection[str] = (),
) -> str:
    """Return the help of a script whose flags are the fields of `kind`.

    With `common`, only these sections are listed, unless `show_all` is set; a last line names `--help all`.
    Flags in `hidden` are left out.
    """
    flags = [flag for flag in flags_of(kind, default) if flag.name not in hidden]
    positional = " ".join(flag.values for flag in flags if flag.is_positional)
    usage = f"usage: {_program()} {positional + ' ' if positional else ''}[--FLAG VALUE ...]"
    sections = [usage, wrap_description(description)]
    if common and not show_all:
        by_name = {flag.name: flag for flag in flags}
        sections += [_section(part.title, [by_name[name] for name in part.names]) for part in common]
        listed = sum(len(part.names) for part in common)
        sections.append(f"These are the {listed} common flags. All {len(flags)} flags: --help all")
    else:
        groups = dict.fromkeys(flag.group for flag in flags)
        sections += [_section(group, [flag for flag in flags if flag.group == group]) for group in groups]
    return "\n\n".join(section for section in sections if section)


def wrap_description(text: str) -> str:
    """Return a docstring with its paragraphs wrapped to WIDTH columns, and its examples unchanged, indented by 4."""
    parts: list[tuple[bool, list[str]]] = []  # (is an example, its lines)
    is_new = True
    continues = False
    for line in text.strip().splitlines():
        if not line.strip():
            is_new = True
            continues = False
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
    """Return the flags that `--help` lists: fields of a dataclass and of its nested dataclasses, in their order.

    Settings of imported checkpoints (`config.Imported`) are left out.
    """
    help_flags: list[HelpFlag] = []
    hints = get_type_hints(kind, include_extras=True)
    plain_hints = get_type_hints(kind)
    texts = field_texts(kind)
    for field in dataclasses.fields(kind):
        value = _default_of(field, default)
        if dataclasses.is_dataclass(plain_hints[field.name]):
            help_flags += flags_of(plain_hints[field.name], value)
            continue
        metadata = getattr(hints[field.name], "__metadata__", ())
        if IMPORTED in metadata:
            continue
        # tyro's marker is compared by its repr, so that this module need not import tyro.
        is_positional = any(repr(item) == "Positional" for item in metadata)
        metavar = next((item.metavar for item in metadata if getattr(item, "metavar", None)), None)
        values = metavar or value_names(plain_hints[field.name])
        if is_positional and metavar is None:
            values = field.name.upper()
        elif PATH_NAME.search(field.name):
            values = values.replace("STR", "PATH")
        text = with_default(" ".join(texts.get(field.name, "").split()), value)
        # Too many choices for the left column: list them in the text.
        if len(values) > WIDTH - 20:
            choices, repeated, _ = values.partition(" ...")
            values = f"NAME{repeated}"
            text = f"{text} One of: {choices.strip('{}').replace(',', ', ')}."
        help_flags.append(HelpFlag(field.name, _group_of(kind), values, text, is_positional))
    return help_flags


@cache
def field_texts(kind: type) -> dict[str, str]:
    """Return the string under each field of a dataclass and of its bases."""
    texts: dict[str, str] = {}
    # Bases first, so that a subclass overrides their texts.
    for base in reversed(kind.__mro__[:-1]):
        # Python does not keep strings under fields: read them from the source.
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for statement, after in zip(body, body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    texts[statement.target.id] = str(after.value.value)
    return texts


def value_names(hint: object) -> str:
    """Return the placeholder of a flag's value, such as `INT|auto` or `{cosine,inverse_sqrt}`; empty for a switch."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        names = [value_names(kind) for kind in kinds]
        # Braces around a single choice, such as {auto}, are left out.
        names = [name if "," in name else name.strip("{}") for name in names]
        return "|".join(names)
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

    A text that does not explain its default gets it at the end, unless it is off or empty. It joins a last parenthesis
    that explains another value: "(0: never)." becomes "(0: never; default: 10).".
    """
    if value is dataclasses.MISSING:
        return f"{text} (required)"
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    name = f"{value:g}" if isinstance(value, float) else str(value)
    shown = "default" if value is None else f"default {name}"
    # A text that explains its default has it as "(VALUE: ..." or "; VALUE: ...".
    explained = re.sub(rf"([(;] ?){re.escape(name)}:", rf"\g<1>{shown}:", text, count=1)
    if explained != text or value in (None, False, ""):
        return explained
    if re.search(r"\([^()]*: [^()]*\)\.$", text):
        return f"{text[:-2]}; default: {name})."
    return f"{text} (default: {name})"


def _group_of(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0].rstrip(".")


def _section(title: str, flags: Sequence[HelpFlag]) -> str:
    return "\n".join([f"{title}:", *(flag.lines() for flag in flags)])


def _program() -> str:
    path = os.path.relpath(sys.argv[0]) if os.path.isabs(sys.argv[0]) else sys.argv[0]
    return sys.argv[0] if path.startswith("..") else path
