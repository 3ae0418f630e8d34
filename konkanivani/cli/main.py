"""Command `konkanivani`: dispatches to a subcommand. Does not import torch."""

import os
import signal
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple, NoReturn

from konkanivani import __version__
from konkanivani.command_line import end_script, flags_of, run_script
from konkanivani.errors import UsageError
from konkanivani.install.environment import end_in_a_line, mend_streams, set_malloc_options, set_process_defaults


class Command(NamedTuple):
    """Module of a subcommand, with a function `main(arguments) -> str`, and one line of help."""

    module: str
    summary: str


COMMANDS = {
    "train": Command("train", "train a recogniser, from scratch or from a pretrained model"),
    "builtin": Command("builtin", "generate the built-in corpus, or a corpus from your sentences"),
    "prepare": Command("prepare", "convert a downloaded corpus to manifests"),
    "inspect": Command("inspect", "check a corpus before training"),
    "plan": Command("plan", "compute the batch sizes that fit a GPU"),
    "evaluate": Command("evaluate", "compute word and character error rates"),
    "transcribe": Command("transcribe", "transcribe recordings to text, JSON or subtitles"),
    "correct": Command("texts.correct", "correct texts with a T5 model, or write pairs to train one"),
    "listen": Command("listen", "transcribe speech from standard input while a person speaks"),
    "serve": Command("serve", "serve a page to speak into"),
    "export": Command("export", "export to safetensors, ONNX, Whisper, PEFT or a folder for the hub"),
    "publish": Command("publish", "upload an exported folder to the Hugging Face hub"),
    "import": Command("import_model", "convert a NeMo model to a checkpoint"),
    "average": Command("average", "average the weights of checkpoints"),
    "compare": Command("compare", "train several models on the same data"),
    "lm": Command("language_model", "train an n-gram language model"),
}
COMPLETION = """# eval "$(konkanivani completion)" in ~/.bashrc or ~/.zshrc
if [ -n "$ZSH_VERSION" ]; then autoload -U +X compinit bashcompinit && compinit && bashcompinit; fi
_konkanivani() {{
    local words="{commands} completion --help --version"
    if [ "$COMP_CWORD" -gt 1 ]; then case "${{COMP_WORDS[1]}}" in
{cases}
        *) words="" ;;
    esac; fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _konkanivani konkanivani"""
HELP = """usage: konkanivani COMMAND [--FLAG VALUE ...]

Speech recognition for languages with little data, on a small GPU or a CPU.

Commands:
{commands}
  completion  print a script that completes commands and flags in bash and zsh

konkanivani COMMAND --help lists the flags of a command, konkanivani --version prints the version.
A first model in a few minutes:

    konkanivani builtin --output data/builtin
    konkanivani train --preset minimal --train_manifest data/builtin/train.jsonl \\
        --valid_manifest data/builtin/valid.jsonl --test_manifest data/builtin/test.jsonl
    konkanivani transcribe data/builtin/audio
"""


def main() -> NoReturn:
    """Run the subcommand that the command line names, and end the process with its exit code."""
    prepare_process()
    program = "python -m konkanivani" if os.path.basename(sys.argv[0]) == "__main__.py" else "konkanivani"
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in COMMANDS:
        # Usage lines and messages name the program as it was started (`command_line_of`).
        sys.argv = [f"{program} {command}", *arguments]
        run_command(command)
    end_script(run_script(lambda: answer(command)))


def answer(command: str) -> str:
    """Return the text for a command line without a subcommand; raise UsageError if it is not understood."""
    if command in ("-h", "--help", "help"):
        listed = "\n".join(f"  {name:10}  {command.summary}" for name, command in COMMANDS.items())
        return HELP.format(commands=listed).rstrip()
    if command == "--version":
        return __version__
    if command == "completion":
        return completion_script()
    near = get_close_matches(command, COMMANDS, n=1)
    meant = f" Did you mean {near[0]}?" if near else ""
    raise UsageError(f"There is no command {command}.{meant} Choose one of: {', '.join(COMMANDS)}.")


def run_command(command: str) -> NoReturn:
    """Run a subcommand with the arguments of this process, and end the process with its exit code."""
    end_script(run_script(lambda: main_of(command)(sys.argv[1:])))


def main_of(command: str) -> Callable[[list[str]], str]:
    """Return the main function of a subcommand, which returns the text to print."""
    # Imported when it runs: the modules of the other commands are not needed.
    function: Callable[[list[str]], str] = import_module(f"konkanivani.cli.{COMMANDS[command].module}").main
    return function


def prepare_process() -> None:
    """Repair the standard streams and set the defaults of the allocators and thread pools, before torch is imported.

    `bootstrap.rerun_under_venv` does the same for the scripts of a checkout.
    """
    mend_streams()
    sys.excepthook = end_in_a_line
    set_process_defaults(os.environ)
    set_malloc_options(os.environ)
    # `konkanivani.train` starts this process with SIGINT blocked; one that has arrived is handled here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def completion_script() -> str:
    """Return a script that completes subcommands and flags in bash and zsh, and file names elsewhere."""
    cases = []
    for name, command in COMMANDS.items():
        flags = flags_of(import_module(f"konkanivani.cli.{command.module}").Flags)
        listed = " ".join(f"--{flag.name}" for flag in flags if not flag.is_positional)
        cases.append(f'        {name}) words="{listed}" ;;')
    return COMPLETION.format(commands=" ".join(COMMANDS), cases="\n".join(cases))
