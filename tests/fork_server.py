"""Scripts run in forks of a parent process that has only imported their modules.

Imports take three to six seconds of a script's run; the rest takes one second in most tests. The parent has one thread
and has created no tensor and no generator, so that a fork starts in the state of a new interpreter after its imports.
The fork runs the script as `__main__` with its own command line, environment, folder and streams. It exits like an
interpreter, without the second that freeing every object takes. Environment variables that are read before the imports
end, such as an allocator's, need a new interpreter, and get one (tests/conftest.py: run_script).
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from konkanivani.install.environment import set_process_defaults
from tests.timeouts import PROCESS_TIMEOUT

PR_SET_PDEATHSIG = 1  # linux/prctl.h
ROOT = Path(__file__).resolve().parent.parent
THREADS = 2
DEV_NULL = Path(os.devnull)
IMPORTED_MODULES = (
    *("numpy.random", "PIL.GifImagePlugin", "PIL.PngImagePlugin", "html", "safetensors.torch"),
    *("multiprocessing.popen_fork", "multiprocessing.synchronize"),
    *("torch.utils.tensorboard",),
    *("torch.utils.serialization", "torch._dynamo"),  # tracing imports _dynamo
    *("konkanivani.recipe.train", "konkanivani.recipe.dry_run", "konkanivani.recipe.evaluation_model"),
    *("konkanivani.cli.prepare", "konkanivani.corpora.builtin"),
    *("konkanivani.inference.recognizer", "konkanivani.inference.transcribe"),
    *("konkanivani.corpora.health_report", "konkanivani.scoring.report"),
)
# Prefixes of variables that are read only when an interpreter or a library starts: a fork keeps the parent's values.
STARTUP_PREFIXES = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "MKL_", "ONEDNN_", "PYTORCH_", "LC_", "LANG")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # must be set before torch is imported; tests may share their cores
INITIAL_ENVIRONMENT = dict(os.environ)
Before = Callable[[], None] | None
SERVE = "import sys; from tests.fork_server import serve; serve(int(sys.argv[1]), sys.argv[2:])"


@dataclass(frozen=True)
class Job:
    """Script to run, with files as its streams; `errors` None sends stderr to `output`.

    `before` is called in the fork, and may change the environment of the script.
    """

    script: Path
    arguments: Sequence[str]
    output: Path
    errors: Path | None = None
    cwd: Path = ROOT
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    threads: int = THREADS
    stdin: Path = DEV_NULL
    before: Before = None

    def run(self) -> None:
        """Run the script in this process, a fork."""
        import numpy

        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # an interrupted test leaves no process
        self._open_streams()
        os.environ.clear()
        os.environ.update(self.environment, OMP_NUM_THREADS=str(self.threads))
        os.chdir(self.cwd)
        numpy.random.seed()
        if self.threads != THREADS:
            import torch

            torch.set_num_threads(self.threads)
        if self.before:
            self.before()
        sys.argv = [str(self.script), *self.arguments]
        own_folders = ("", str(ROOT), str(ROOT / "training_scripts"))
        sys.path[:] = [str(self.script.parent), *(path for path in sys.path if path not in own_folders)]
        runpy.run_path(str(self.script), run_name="__main__")

    def _open_streams(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        output = os.open(self.output, flags, 0o644)
        errors = os.open(self.errors, flags, 0o644) if self.errors else os.dup(output)
        for number, opened in enumerate((os.open(self.stdin, os.O_RDONLY), output, errors)):
            os.dup2(opened, number)
            os.close(opened)
        is_direct = sys.stdout.write_through  # set by PYTHONUNBUFFERED
        written = open(1, "wb", buffering=0 if is_direct else -1, closefd=False)
        sys.stdin = sys.__stdin__ = open(0, closefd=False)
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(written, write_through=is_direct)
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def script_of(command: Sequence[str]) -> tuple[Path, Sequence[str]]:
    """Return the script of a command of this project, with its arguments; `-m konkanivani train` is the trainer."""
    if command[1:4] == ["-m", "konkanivani", "train"]:
        return ROOT / "training_scripts" / "train_konkanivani_asr.py", command[4:]
    return Path(command[1]), command[2:]


class Fork:
    """Running or finished script that leads a process group, with the interface of subprocess.Popen."""

    def __init__(self, pid: int, parent: "ForkServer") -> None:
        self.pid, self.returncode, self._parent = pid, None, parent
        self._ended = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal; raise TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout)
            self.returncode = self._parent.ask(self.pid)
            os.close(self._ended)
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None while the script runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Send SIGKILL to the script, not to its children."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkedScript:
    """Replacement of subprocess.Popen for scripts of this repository: a fork of this process with piped output."""

    def __init__(self, command: Sequence[str], **_others: object) -> None:
        reading, writing = zip(os.pipe(), os.pipe(), strict=True)
        script, arguments = script_of(command)
        job = Job(script, arguments, *(Path(f"/dev/fd/{end}") for end in writing), Path.cwd())
        self._pid = os.fork()
        if not self._pid:
            _run_and_exit(job)
        for end in writing:
            os.close(end)
        self.stdout, self.stderr = (open(end, encoding="utf-8", errors="replace") for end in reading)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def fork_scripts() -> None:
    """Replace subprocess.Popen by forks; for `Job.before`, if the child processes of the script are not under test."""
    subprocess.Popen = ForkedScript


class ForkedCommand:
    """Replacement of subprocess.Popen for commands of this project: a fork of the fork server with piped output."""

    def __init__(self, command: Sequence[str], **_others: object) -> None:
        with tempfile.TemporaryDirectory() as folder:
            ends = Path(folder, "output"), Path(folder, "errors")
            for end in ends:
                os.mkfifo(end)
            script, arguments = script_of(command)
            self._fork = fork_server().start(Job(script, arguments, *ends, Path.cwd()))
            # Opening a FIFO blocks until the fork opens it too, in the same order.
            self.stdout, self.stderr = (open(end, encoding="utf-8", errors="replace") for end in ends)

    def send_signal(self, number: int) -> None:
        os.kill(self._fork.pid, number)

    def wait(self) -> int:
        return self._fork.wait(PROCESS_TIMEOUT)


class ForkServer:
    """Process that imports the modules and then forks on request; it ends with this process."""

    def __init__(self, imported: Sequence[str] = IMPORTED_MODULES) -> None:
        self._requests, theirs = multiprocessing.Pipe()
        # A second NumPy thread does not survive a fork.
        environment = INITIAL_ENVIRONMENT | {"OMP_NUM_THREADS": str(THREADS), "OPENBLAS_NUM_THREADS": "1"}
        command, passed = [sys.executable, "-c", SERVE, str(theirs.fileno()), *imported], [theirs.fileno()]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, pass_fds=passed)
        theirs.close()

    def start(self, job: Job) -> Fork:
        """Start a job."""
        assert can_fork(job.environment)
        return Fork(self.ask(job), self)

    def run(
        self, script: Path, *arguments: str, cwd: Path = ROOT, stdin: Path = DEV_NULL, before: Before = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a script to its end."""
        with tempfile.TemporaryDirectory() as folder:
            outputs = Path(folder, "output"), Path(folder, "errors")
            fork = self.start(Job(script, arguments, *outputs, cwd, stdin=stdin, before=before))
            try:
                code = fork.wait(PROCESS_TIMEOUT)
            finally:
                fork.kill()
            return subprocess.CompletedProcess(
                (script, *arguments), code, *(each.read_text("utf-8") for each in outputs)
            )

    def run_program(self, source: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """Run a program, given as source text, to its end."""
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "program.py")
            script.write_text(source, encoding="utf-8")
            return self.run(script, *arguments, cwd=cwd)

    def close(self) -> None:
        """Stop the parent process and every fork that still runs."""
        self._requests.close()
        self._process.wait(PROCESS_TIMEOUT)

    def ask(self, request: Job | int) -> int:
        """Return the process id of a started job, or the exit code of a finished process."""
        self._requests.send(request)
        return self._requests.recv()


@functools.cache
def fork_server() -> ForkServer:
    """Return the parent process of this process, started on first use."""
    return ForkServer()


def can_fork(environment: Mapping[str, str]) -> bool:
    """Return whether a fork can use this environment."""
    return _startup_variables(environment) == _startup_variables(INITIAL_ENVIRONMENT)


def _startup_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read before the first line of a script, with the defaults that each script sets."""
    environment = dict(environment)
    set_process_defaults(environment)  # an imported benchmark has also set them in this process
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(STARTUP_PREFIXES) and name != "OMP_NUM_THREADS"
    }


def serve(descriptor: int, imported: Sequence[str]) -> NoReturn:
    """Serve requests until the connection closes."""
    sys.path.insert(1, str(ROOT / "training_scripts"))
    import bootstrap

    bootstrap.rerun_under_venv()  # as at the start of each script: sets options of PyTorch and glibc
    del sys.modules["bootstrap"]
    for name in imported:
        importlib.import_module(name)
    if flags := sys.modules.get("konkanivani.flags"):
        flags.parse_args([])  # the imports and type analysis of tyro take a quarter of a short run
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False  # PyTorch would unregister its operators one by one at the end of each fork
    gc.freeze()  # otherwise the first collection in each fork copies all shared pages
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack a thread"
    requests = Connection(descriptor)
    while True:
        try:
            request = requests.recv()
        except EOFError:
            os._exit(0)  # running forks end with this process
        if isinstance(request, int):
            requests.send(os.waitstatus_to_exitcode(os.waitpid(request, 0)[1]))
        elif pid := os.fork():
            with contextlib.suppress(OSError):  # the fork may have called it already, and exited
                os.setpgid(pid, pid)
            requests.send(pid)
        else:
            requests.close()
            _run_and_exit(request)


def _run_and_exit(job: Job) -> NoReturn:
    """Run a script and exit as an interpreter does."""
    code = 0
    try:
        job.run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and code is not end.code:
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)
