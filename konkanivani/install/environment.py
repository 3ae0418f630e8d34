"""Virtual environment of the project, and defaults of the process.

Standard library only: training_scripts/bootstrap.py uses it before anything is installed, and applies the defaults
before torch is imported.
"""

import configparser
import contextlib
import ctypes
import fcntl
import importlib.metadata
import importlib.util
import io
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from konkanivani.install.packages import (
    GIB,
    Installer,
    NothingChanged,
    SetupError,
    TorchBuild,
    choose_build,
    explain_failure,
    fall_back_if_unreachable,
    read_nvidia_smi,
    say,
)

# --------------------
# Defaults of a process: streams, C allocator, OpenMP, oneDNN and PyTorch's CUDA allocator.


# In bytes. Larger blocks are mapped one by one and returned to the system when they are freed; smaller ones are
# allocated faster from the heap. A run with a memory budget sets a lower threshold (konkanivani/memory/monitor.py).
MALLOC_THRESHOLD = 8 * 1024 * 1024
MALLOC_TRIM_THRESHOLD = 512 * 1024 * 1024  # free memory kept at the end of the heap, for the next step
MALLOC_TOP_PAD = 16 * 1024 * 1024  # extra growth of the heap, which it keeps
# Parameters of mallopt(), from malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8

Environment = MutableMapping[str, str]


def mend_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed, here and for child processes.

    Characters that the encoding of stdout cannot represent, as paths may contain them, are escaped.
    """
    # Otherwise the next opened file gets the stream's number, and native code that prints writes into a checkpoint.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open() returns the lowest free number, this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", encoding="utf-8", errors="replace", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def end_in_a_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Handle Ctrl-C during imports or flag parsing as a command does later: one line, exit code 130.

    For `sys.excepthook`.
    """
    if issubclass(kind, KeyboardInterrupt):
        with contextlib.suppress(OSError):  # Ctrl-C may have ended the reader of stderr too
            print("Interrupted.", file=sys.stderr, flush=True)
        os._exit(130)
    sys.__excepthook__(kind, error, trace)


def set_process_defaults(environment: Environment) -> None:
    """Set environment variables that PyTorch and its libraries read when they are loaded; the user's values stay."""
    set_allocator_defaults(environment)
    # Spinning OpenMP threads make training a hundred times slower on a shared core, for example with the data loading
    # processes; sleeping ones cost 10 % on a core of their own (docs/experiments.md).
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    # By default oneDNN caches the kernels of 1,024 shapes, and almost every utterance length is a new shape.
    environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    if not has_name(environment):
        # In a container the user may be a number without a name, for which PyTorch raises KeyError.
        environment["LOGNAME"] = f"uid-{os.getuid()}"


def has_name(environment: Environment) -> bool:
    """Return whether the current user has a name; in a container it may be only a number."""
    if any(environment.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):  # as getpass.getuser() does
        return True
    try:
        return bool(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        return False


def set_allocator_defaults(environment: Environment) -> None:
    """Enable expandable segments of CUDA memory, against fragmentation on small GPUs; the user's setting stays."""
    # PyTorch reads one of the two names, depending on its release, at first use: set both before the import.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if not any(name in environment for name in names):
        environment.update((name, "expandable_segments:True") for name in names)


def add_huge_pages(environment: Environment) -> None:
    """Make glibc request pages of 2 MiB in a program started with `environment`; the user's choice stays.

    glibc reads this only at program start, so a Python that is not restarted runs without it.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    # A step frees its gradients and allocates them again, 25,000 pages of 4 KiB for 25 M parameters: a fortieth of its
    # time (docs/experiments.md).
    if "glibc.malloc.hugetlb" not in tunables:
        environment["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, "glibc.malloc.hugetlb=1"]))


def set_malloc_options(environment: Environment) -> bool:
    """Make glibc return freed memory to the system and use one heap for all threads; return whether that was set.

    Does nothing with another C library. The user's settings stay. Measurements: docs/experiments.md.
    """
    # mallopt() instead of environment variables, which count only before a process starts and which other programs
    # would inherit.
    options = []
    if not is_malloc_set(environment, "mmap_threshold", "trim_threshold"):
        # By default malloc soon keeps blocks of up to 32 MiB in its heap, where freed tensors of mixed sizes leave
        # holes that none of the next fit: more memory is resident than in use.
        # Setting either one disables the dynamic adjustment of both.
        options += [(M_TRIM_THRESHOLD, MALLOC_TRIM_THRESHOLD), (M_MMAP_THRESHOLD, MALLOC_THRESHOLD)]
        if not is_malloc_set(environment, "top_pad"):
            # A heap that grows by exact amounts and shrinks at once has its pages cleared again and again, a tenth of a
            # step. It grows by more, and keeps its free end for the next step's gradients.
            options.append((M_TOP_PAD, MALLOC_TOP_PAD))
    if not is_malloc_set(environment, "arena_max"):
        # Otherwise each thread has a heap whose holes no other thread fills: concurrent micro-batches would need 400
        # MiB more.
        options.append((M_ARENA_MAX, 1))
    try:
        is_glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, ValueError, TypeError):  # another system or C library
        return False
    # A list, not a generator: all() must not skip options after a failure.
    return is_glibc and bool(options) and all([mallopt(option, value) for option, value in options])


def is_malloc_set(environment: Environment, *options: str) -> bool:
    """Return whether the user has set one of these glibc options, as a tunable or a MALLOC_ variable."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    variables = {variable.rstrip("_") for variable in environment}  # MALLOC_ARENA_MAX, but MALLOC_TRIM_THRESHOLD_
    return any(f"glibc.malloc.{name}" in tunables or f"MALLOC_{name.upper()}" in variables for name in options)


# --------------------
# The Python environment .venv of a checkout: its requirements, and their installation.


# Module of a distribution, if it is not the distribution's name with "_" for "-".
MODULE_NAMES = {"PyYAML": "yaml", "import-linter": "importlinter", "nvidia-ml-py": "pynvml", "pytest-xdist": "xdist"}
# Imported after the installation besides the requirements' own modules: large, and imported late.
LATE_MODULES = ("torch._dynamo", "torch.utils.tensorboard", "transformers.models.whisper.modeling_whisper")


@dataclass(frozen=True)
class Stamp:
    """Record of a finished set-up: the PyTorch builds wanted for the GPUs and installed, and the folder."""

    wanted: str
    installed: str
    root: str

    def serves(self, build: str) -> bool:
        """Return whether the installed build is usable where this build is wanted now.

        A CUDA build stays when no GPU is found: it runs on the CPU as well, and the folder may be shared with a machine
        that has the GPU.
        """
        return build in (self.wanted, self.installed, "cpu")


class Requirements:
    """Requirements of setup.cfg."""

    def __init__(self, root: Path) -> None:
        self._setup = configparser.ConfigParser()
        self._setup.read(root / "setup.cfg", encoding="utf-8")
        self.extras = sorted(self._setup["options.extras_require"])

    def lines(self, extras: Collection[str]) -> list[str]:
        """Return the requirement strings: the runtime's, then each extra's."""
        texts = [self._setup["options"]["install_requires"]]
        texts += [self._setup["options.extras_require"][extra] for extra in extras]
        return [line.strip() for text in texts for line in text.splitlines() if line.strip()]

    def modules(self, extras: Collection[str]) -> list[str]:
        """Return the module names of the requirements."""
        return [module_of(re.split(r"[<>=\s]", line)[0]) for line in self.lines(extras)]

    def missing(self, extras: Collection[str]) -> list[str]:
        """Return the requirements that the running Python lacks or has out of bounds, without importing them."""
        missing = []
        for line in self.lines(extras):
            # setup.cfg uses only a name and the bounds >= and <, no extras or markers.
            name, bounds = re.findall(r"([\w.-]+)\s*(.*)", line)[0]
            if importlib.util.find_spec(module_of(name)) is None:
                missing.append(name)
            elif bounds:
                # Without metadata it is built from source: assume that the version is right.
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    version = importlib.metadata.version(name)
                    if not is_version_in(version, bounds):
                        missing.append(f"{name}{bounds} (found {version})")
        return missing


def module_of(distribution: str) -> str:
    """Return the name of the module that a distribution installs."""
    return MODULE_NAMES.get(distribution, distribution.replace("-", "_"))


def is_version_in(version: str, bounds: str) -> bool:
    """Return whether a version such as "2.11.0+cu126" is within bounds such as ">=2.10,<2.12"."""
    numbers = [int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3]]
    for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", bounds):
        is_below = numbers < [int(n) for n in bound.split(".")]
        if is_below != (operator == "<"):
            return False
    return True


class Venv:
    """The environment .venv of a checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.stamp = self.folder / "konkanivani-installed.json"
        # Exists from before the first change until after the last: even SIGKILL leaves it.
        self.unfinished = self.folder / "konkanivani-unfinished.json"
        self.lock = self.folder / "konkanivani.lock"
        # Downloads, where the user's cache is on another disk; it survives `clear`.
        self.cache = self.folder / "uv-cache"

    def is_running(self) -> bool:
        """Return whether the running Python is this environment's."""
        return os.path.realpath(sys.prefix) == os.path.realpath(self.folder)

    def read_stamp(self) -> Stamp | None:
        """Return the record of the last set-up; None if it is damaged, of another checkout or absent."""
        stamp = self._read_any_stamp()
        return stamp if stamp is not None and stamp.root == str(self.root) else None

    def _read_any_stamp(self) -> Stamp | None:
        try:
            return Stamp(**json.loads(self.stamp.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def missing(self, extras: Collection[str]) -> list[str] | None:
        """Return the requirements that are missing; None if the environment's Python cannot tell."""
        # Does not import pip: an environment made with `uv venv` has none, and is complete without.
        question = (
            "import json, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
            "from konkanivani.install.environment import Requirements\n"
            "print(json.dumps(Requirements(Path(sys.argv[1])).missing(sys.argv[2:])))"
        )
        command = [str(self.python), "-B", "-c", question, str(self.root), *sorted(extras)]
        try:
            return json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL))
        except (OSError, ValueError, subprocess.CalledProcessError):
            return None

    def has_working_python(self) -> bool:
        """Return whether the environment's Python starts, of whatever version."""
        try:
            return subprocess.run([str(self.python), "-c", ""], capture_output=True).returncode == 0
        except OSError:
            return False

    def is_ready(self, extras: Collection[str], wanted: TorchBuild) -> bool:
        """Return whether the environment can be used unchanged; without a stamp (made by hand) the modules suffice."""
        if self.unfinished.exists() or self.missing(extras) != []:
            return False
        stamp = self.read_stamp()
        return stamp.serves(wanted.name) if stamp else not self.stamp.exists()

    def prepare(self, extras: Collection[str]) -> None:
        """Install missing packages into the environment; only one process at a time does so."""
        choice = choose_build(read_nvidia_smi())
        if self.is_ready(extras, choice.build):
            return
        folder = self.folder if self.folder.is_dir() else self.root
        if not os.access(folder, os.W_OK):
            remedy = f"copy {self.root}, without .venv, to a folder of your own and start it there"
            raise SetupError(
                f"{folder} is not writable, so its environment cannot be completed: let its owner (user "
                f"{folder.stat().st_uid}) start this, or {remedy}"
            )
        with self.locked() as lock:
            if self.is_ready(extras, choice.build):  # another process completed it while this one waited
                return
            if choice.notice:
                say(choice.notice)
            self.install(extras, choice.build, lock)

    @contextlib.contextmanager
    def locked(self) -> Iterator[IO[str]]:
        """Hold the lock and yield its open file; print a line if another process holds it, or if locks do not work."""
        self.folder.resolve().mkdir(exist_ok=True)  # .venv may be a link to a folder on a larger disk
        # The lock file is never deleted: a waiting process would lock the deleted one.
        with self.lock.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"Another setup is running in {self.folder}: waiting for it to finish")
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:  # some file systems of clusters have no locks
                say(f"{self.folder} cannot be locked ({error.strerror}): do not start another setup of it meanwhile")
            yield lock

    def install(self, extras: Collection[str], wanted: TorchBuild, lock: IO[str]) -> None:
        """Install the requirements; recreate an environment that is incomplete or was moved.

        If the set-up fails before it changes anything, `unfinished` is removed, so that being offline never costs a
        working environment.
        """
        stamp = self.read_stamp()
        is_foreign = stamp is None and self.stamp.exists()
        missing = None if self.unfinished.exists() or is_foreign else self.missing(extras)
        has_torch = missing is not None and not any(name.startswith("torch") for name in missing)
        is_kept = has_torch and (stamp is None or stamp.serves(wanted.name))
        build = wanted
        if not is_kept:
            choice = fall_back_if_unreachable(wanted)
            build = choice.build
            if choice.notice:
                say(choice.notice)
        needs_torch = not has_torch or not (is_kept or (stamp is not None and stamp.installed == build.name))
        self.check_disk(shutil.disk_usage(self.folder).free, build.disk_bytes if needs_torch else GIB // 2)
        if missing is None:
            self.check_owner()
        self.unfinished.touch()
        if missing is None:
            self.create()
        try:
            installer = Installer(self.root, self.python, self.cache, lock)
            if needs_torch:
                self.install_torch(installer, build, has_torch)
            if not is_kept:
                self.write_stamp(Stamp(wanted.name, build.name, str(self.root)))
            say("[3/4] Installing the other libraries: 100 to 250 MB")
            package = f".[{','.join(sorted(extras))}]" if extras else "."
            installer.install("--editable", package)
        except NothingChanged:
            self.unfinished.unlink()
            raise
        self.compile(extras)
        self.unfinished.unlink()

    def install_torch(self, installer: Installer, build: TorchBuild, has_torch: bool) -> None:
        """Install PyTorch; another build is downloaded before the old one is removed."""
        say(f"[2/4] Installing PyTorch {build.size}; a few minutes on a fast connection")
        arguments = [line for line in Requirements(self.root).lines([]) if line.startswith("torch")]
        if build.index:
            arguments += ["--index-url", build.index]
        if has_torch:
            arguments.append("--force-reinstall")
        installer.install(*arguments)

    def compile(self, extras: Collection[str]) -> None:
        """Compile the modules that are imported, by importing them.

        uv compiles nothing, and where PYTHONDONTWRITEBYTECODE is set, or .venv becomes read-only, every start would
        compile again: 4 s of CPU time for torch. All 14,800 files would take 35 s, the 3,700 that are imported 7 s.
        """
        say("[4/4] Compiling the libraries")
        names = [*Requirements(self.root).modules(extras), *LATE_MODULES]
        program = (
            "import importlib, sys\n"
            "for name in sys.argv[1:]:\n"
            "    try: importlib.import_module(name)\n"
            "    except Exception: pass\n"  # a missing extra; the script that needs it will report it
        )
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        subprocess.run([str(self.python), "-c", program, *names], env=environment, capture_output=True)

    def create(self) -> None:
        """Recreate the environment with the running Python, by venv, uv or virtualenv."""
        self.clear()
        python = getattr(sys, "_base_executable", sys.executable) if self.is_running() else sys.executable
        say(f"[1/4] Creating the environment {self.folder} with Python {sys.version.split()[0]}")
        reason = "it has no ensurepip or virtualenv, and uv is not on PATH"
        command = creating_command(python, self.folder.resolve())  # venv refuses a link to a folder
        is_created = False
        if command:
            process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            reason = str(explain_failure(process.stdout, self.root, "the command"))
            # If only ensurepip fails, there is a Python that starts, but no pip.
            is_created = process.returncode == 0
        if not is_created or self.missing([]) is None:
            version = "{}.{}".format(*sys.version_info[:2])
            raise SetupError(
                f"The Python at {python} could not create an environment ({reason}): install its venv package (on "
                f"Debian and Ubuntu: apt install python{version}-venv) or uv"
            )

    def check_owner(self) -> None:
        """Raise SetupError if `clear` would delete packages of the user or of another checkout.

        These are a link to the environment of another checkout that still exists, and an environment without a stamp
        or the mark `unfinished`, which this set-up has not made, if its Python starts.
        """
        stamp = self._read_any_stamp() if self.folder.is_symlink() else None
        if stamp is not None and stamp.root != str(self.root) and Path(stamp.root, ".venv").exists():
            raise SetupError(
                f"{self.folder} is a link to the environment of {stamp.root}, which would be emptied: remove the "
                "link, so that this checkout gets its own"
            )
        if not self.stamp.exists() and not self.unfinished.exists() and self.has_working_python():
            raise SetupError(
                f"{self.folder} is an environment that was not made by this set-up and cannot be used, for example "
                "because its Python is older than 3.10: move it away or delete it, and start again"
            )

    def clear(self) -> None:
        """Empty the folder except for its lock, mark and downloads; raise SetupError if it is no environment."""
        names = {path.name for path in self.folder.iterdir()} - {self.lock.name, self.unfinished.name, self.cache.name}
        # Never empty a folder of the user that happens to be called .venv.
        if names and not {"pyvenv.cfg", "bin", "lib"} & names:
            raise SetupError(f"{self.folder} is not a virtual environment: move that folder away")
        for name in names:
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def write_stamp(self, stamp: Stamp) -> None:
        """Write the record of the set-up atomically."""
        new = self.stamp.with_suffix(".new")
        new.write_text(json.dumps(asdict(stamp)), encoding="utf-8")
        new.replace(self.stamp)

    def check_disk(self, free_bytes: int, needed_bytes: int) -> None:
        """Raise SetupError if the free disk space is too small for the installation."""
        if free_bytes < needed_bytes:
            raise SetupError(
                f"The installation needs {needed_bytes / GIB:.1f} GB of free space at {self.root}, but only "
                f"{free_bytes / GIB:.1f} GB are free: free disk space, or move the folder to another disk"
            )


def has_module(name: str) -> bool:
    """Return whether the running Python has a module, without importing it."""
    return importlib.util.find_spec(name) is not None


def creating_command(python: str, folder: Path) -> list[str]:
    """Return the command that creates an environment with pip; empty if there is none."""
    uv = shutil.which("uv")
    if has_module("ensurepip"):
        return [python, "-m", "venv", str(folder)]
    if uv:
        return [uv, "venv", "--quiet", "--seed", "--allow-existing", "--python", python, str(folder)]
    if has_module("virtualenv"):
        return [python, "-m", "virtualenv", "--quiet", str(folder)]
    return []
