"""Find or create the Python environment of KonkaniVani.

    python3 training_scripts/bootstrap.py --extras synthesis,test

prints only the path of the Python to use on stdout; progress goes to stderr. Every script calls
`rerun_under_venv()` first. Exit codes: 0 done, 2 usage, 6 no environment could be created (one sentence says why).

Standard library only. The syntax is Python 2.7's, hence no annotations and no f-strings: on a Python that is too old
this file must still be able to print an error, or to start a newer Python.
"""

from __future__ import print_function

import argparse
import collections
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "konkanivani-installed.json")
UNFINISHED = os.path.join(VENV, "konkanivani-unfinished.json")
LOCK = os.path.join(VENV, "konkanivani.lock")

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 14)  # range of the PyTorch releases in setup.cfg
EXIT_RESOURCES = 6
RERUN_MARK = "KONKANIVANI_RERUN"
HOW_TO_SET_UP = "Run ./run_training_memory_optimized.sh or python3 training_scripts/bootstrap.py in %s" % ROOT

# Module of a distribution, if it is not the distribution's name with "_" for "-".
MODULE_NAMES = {"PyYAML": "yaml", "import-linter": "importlinter", "nvidia-ml-py": "pynvml", "pytest-xdist": "xdist"}

# In bytes. Larger blocks are mapped one by one and returned to the system when they are freed; smaller ones are
# allocated faster from the heap. A run with a memory budget sets a lower threshold (konkanivani/memory/monitor.py).
MALLOC_THRESHOLD = 8 * 1024 * 1024
MALLOC_TRIM_THRESHOLD = 512 * 1024 * 1024  # free memory kept at the end of the heap, for the next step
MALLOC_TOP_PAD = 16 * 1024 * 1024  # extra growth of the heap, which it keeps

GIB = 1024**3
Build = collections.namedtuple("Build", "words disk_bytes")
BUILDS = {
    "default": Build("with its CUDA libraries: about 2.8 GB to download, 4.6 GB on disk", 7 * GIB),
    "cu128": Build("for CUDA 12.8: about 3 GB to download, 7 GB on disk", 10 * GIB),
    "cu126": Build("for CUDA 12.6: about 2.6 GB to download, 5 GB on disk", 7 * GIB),
    "cpu": Build("without CUDA: about 200 MB to download, 700 MB on disk", 2 * GIB),
}


class SetupError(Exception):
    """Failed set-up; the text is the one sentence that the user reads."""


class NothingChanged(SetupError):
    """Set-up that failed before it changed anything."""


def say(text):
    """Print one line of progress on stderr; stdout is for the path only."""
    print(text, file=sys.stderr)
    sys.stderr.flush()


# --------------------------------------------------------------------------------------------------------- requirements


def read_setup():
    """Return setup.cfg as a ConfigParser."""
    import configparser

    setup = configparser.ConfigParser()
    setup.read(os.path.join(ROOT, "setup.cfg"), encoding="utf-8")
    return setup


def read_requirements(extras):
    """Return the requirement strings of setup.cfg: the runtime's, then each extra's."""
    setup = read_setup()
    texts = [setup.get("options", "install_requires")]
    texts += [setup.get("options.extras_require", extra) for extra in extras]
    return [line.strip() for text in texts for line in text.splitlines() if line.strip()]


def is_version_in(version, bounds):
    """Return whether a version such as "2.11.0+cu126" is within bounds such as ">=2.10,<2.12" (only >= and < occur)."""
    numbers = [int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3]]
    for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", bounds):
        limit = [int(n) for n in bound.split(".")]
        if (operator == ">=" and numbers < limit) or (operator == "<" and numbers >= limit):
            return False
    return True


def missing_requirements(requirements):
    """Return the requirements that are missing in the running Python or out of bounds, without importing them."""
    import importlib.metadata
    import importlib.util

    missing = []
    for requirement in requirements:
        # setup.cfg uses only a name and bounds, no extras or markers.
        name, bounds = re.match(r"([\w.-]+)\s*(.*)", requirement).groups()
        if importlib.util.find_spec(MODULE_NAMES.get(name, name.replace("-", "_"))) is None:
            missing.append(name)
        elif bounds:
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue  # built from source without metadata: assume that the version is right
            if not is_version_in(version, bounds):
                missing.append("%s%s (found %s)" % (name, bounds, version))
    return missing


# ---------------------------------------------------------------------------------------------------- start of a script


def mend_streams():
    """Open /dev/null for each of stdin, stdout and stderr that is closed, here and for child processes.

    Characters that the encoding of stdout cannot represent, as paths may contain them, are escaped.
    """
    # Otherwise the next opened file gets the stream's number, and native code that prints writes into a checkpoint.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open() returns the lowest free number, this one
            getattr(os, "set_inheritable", lambda *_: None)(number, True)
        if getattr(sys, name) is None:
            stream = io.open(number, "w" if number else "r", encoding="utf-8", errors="replace", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, "__%s__" % name, stream)
    # Python 2 has no reconfigure().
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def set_process_defaults(environment):
    """Set environment variables that PyTorch and its libraries read when they are loaded; the user's values stay."""
    set_allocator_defaults(environment)
    # Spinning OpenMP threads make training a hundred times slower on a shared core, for example with the data loading
    # processes; sleeping ones cost 10 % on a core of their own (docs/experiments.md).
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    # By default oneDNN caches the kernels of 1,024 shapes, and almost every utterance length is a new shape.
    environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    if not has_name(environment):
        # In a container the user may be a number without a name, for which PyTorch raises KeyError.
        environment["LOGNAME"] = "uid-%d" % os.getuid()


def has_name(environment):
    """Return whether the current user has a name; in a container it may be only a number."""
    import pwd

    if any(environment.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):  # as getpass.getuser() does
        return True
    try:
        return bool(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        return False


def add_huge_pages(environment):
    """Make glibc request pages of 2 MiB in a program started with `environment`; the user's choice stays.

    glibc reads this only at program start, so a Python that is not restarted runs without it.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    # A step frees its gradients and allocates them again, 25,000 pages of 4 KiB for 25 M parameters: a fortieth of its
    # time (docs/experiments.md).
    if "glibc.malloc.hugetlb" not in tunables:
        environment["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, "glibc.malloc.hugetlb=1"]))


def set_allocator_defaults(environment):
    """Enable expandable segments of CUDA memory, against fragmentation on small GPUs; the user's setting stays."""
    # PyTorch reads one of the two names, depending on its release, at first use: set both before the import.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if not any(name in environment for name in names):
        environment.update((name, "expandable_segments:True") for name in names)


def set_malloc_options(environment):
    """Make glibc return freed memory to the system and use one heap for all threads; return whether that was set.

    Does nothing with another C library. The user's settings stay. Measurements: docs/experiments.md.
    """
    # mallopt() instead of environment variables, which count only before a process starts and which other programs
    # would inherit.
    m_trim_threshold, m_top_pad, m_mmap_threshold, m_arena_max = -1, -2, -3, -8  # malloc.h
    options = []
    if not is_malloc_set(environment, "mmap_threshold", "trim_threshold"):
        # By default malloc soon keeps blocks of up to 32 MiB in its heap, where freed tensors of mixed sizes leave
        # holes that none of the next fit: more memory is resident than in use.
        # Setting either one disables the dynamic adjustment of both.
        options += [(m_trim_threshold, MALLOC_TRIM_THRESHOLD), (m_mmap_threshold, MALLOC_THRESHOLD)]
        if not is_malloc_set(environment, "top_pad"):
            # A heap that grows by exact amounts and shrinks at once has its pages cleared again and again, a tenth of a
            # step. It grows by more, and keeps its free end for the next step's gradients.
            options.append((m_top_pad, MALLOC_TOP_PAD))
    if not is_malloc_set(environment, "arena_max"):
        # Otherwise each thread has a heap whose holes no other thread fills: concurrent micro-batches would need 400
        # MiB more.
        options.append((m_arena_max, 1))
    try:
        import ctypes

        is_glibc = os.confstr("CS_GNU_LIBC_VERSION").startswith("glibc")
        mallopt = ctypes.CDLL(None).mallopt
    except (ImportError, AttributeError, OSError, ValueError, TypeError):  # another system or C library
        return False
    # A list, not a generator: all() must not skip options after a failure.
    return is_glibc and bool(options) and all([mallopt(option, value) for option, value in options])


def is_malloc_set(environment, *options):
    """Return whether the user has set one of these glibc options, as a tunable or a MALLOC_ variable."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    variables = {variable.rstrip("_") for variable in environment}  # MALLOC_ARENA_MAX, but MALLOC_TRIM_THRESHOLD_
    return any("glibc.malloc.%s" % name in tunables or "MALLOC_%s" % name.upper() in variables for name in options)


def rerun_under_venv():
    """Return if the running Python has all requirements; else run the same command line under .venv instead.

    Ends the process with exit code 6 and one sentence if there is no usable environment. Also repairs the streams, puts
    the repository's root first on sys.path, and sets the allocators' defaults.
    """
    mend_streams()
    sys.excepthook = end_in_a_line
    sys.path.insert(0, ROOT)
    set_process_defaults(os.environ)
    was_rerun = os.environ.pop(RERUN_MARK, None)  # popped, so that child processes may rerun themselves
    missing = missing_requirements(read_requirements([])) if is_suitable(sys.version_info) else None
    is_unfinished = os.path.exists(UNFINISHED)
    # An incomplete .venv may have all modules, but some of them in pieces.
    if missing == [] and not (is_in_venv() and is_unfinished):
        set_malloc_options(os.environ)
        return
    if os.path.exists(VENV_PYTHON) and not is_unfinished and not is_in_venv() and not was_rerun:
        # Prevents an endless loop if .venv lacks a requirement.
        os.environ[RERUN_MARK] = "1"
        add_huge_pages(os.environ)
        command_line = getattr(sys, "orig_argv", [None] + sys.argv)  # with the interpreter's own flags, if known
        os.execv(VENV_PYTHON, [VENV_PYTHON] + command_line[1:])
    say("error: %s. %s, then start again." % (why_not(missing, is_unfinished), HOW_TO_SET_UP))
    sys.exit(EXIT_RESOURCES)


def end_in_a_line(kind, error, trace):
    """Handle Ctrl-C during imports or flag parsing as the scripts do later: one line, exit code 130."""
    if issubclass(kind, KeyboardInterrupt):
        say("Interrupted.")
        os._exit(130)
    sys.__excepthook__(kind, error, trace)


def why_not(missing, is_unfinished):
    """Return the reason why a script cannot run, as a clause."""
    if is_unfinished:
        return "The environment %s is incomplete: its installation was interrupted, or is still running" % VENV
    if missing is None:
        return wrong_python(sys.version_info)
    return "The Python at %s does not have %s" % (sys.executable, ", ".join(missing))


# ----------------------------------------------------------------------------------------------------- choice of Python


def is_suitable(version):
    """Return whether PyTorch is built for this (major, minor, ...) version of Python."""
    return OLDEST_PYTHON <= tuple(version[:2]) <= NEWEST_PYTHON


def wrong_python(version):
    """Return the message for an unsupported version of Python, as a clause."""
    numbers = tuple(version[:2]) + OLDEST_PYTHON + NEWEST_PYTHON
    return "This is Python %d.%d, and KonkaniVani needs Python %d.%d to %d.%d" % numbers


def is_in_venv():
    """Return whether the running Python is .venv's."""
    return os.path.realpath(sys.prefix) == os.path.realpath(VENV)


def find_suitable_python():
    """Return the path of .venv's Python, or the newest suitable one on PATH that can create environments, or None."""
    question = (
        "import sys; from importlib.util import find_spec as f; "
        "print(sys.version_info[0], sys.version_info[1], int(any(map(f, ['ensurepip', 'virtualenv', 'pip']))),"
        " sys.executable)"
    )
    names = ["python3.%d" % minor for minor in range(NEWEST_PYTHON[1], OLDEST_PYTHON[1] - 1, -1)]
    for name in [VENV_PYTHON] + names:
        try:  # run, not only found: a version manager's shim on PATH may have no Python installed
            answer = subprocess.check_output([name, "-c", question], stderr=subprocess.STDOUT).decode().split(None, 3)
        except (OSError, subprocess.CalledProcessError):
            continue
        # sys.executable may contain spaces: it is the rest of the line.
        if is_suitable([int(answer[0]), int(answer[1])]) and answer[2] == "1":
            return answer[3].strip()
    return None


def hand_over_to_suitable_python(arguments):
    """Run this file again under a Python that PyTorch is built for; raise SetupError if there is none."""
    python = find_suitable_python()
    if python is None:
        raise SetupError(
            (
                "%s; no python3.10 to python3.14 that can create environments is on PATH. Install one (for "
                "example apt install python3.11 python3.11-venv, or conda create -n konkanivani python=3.12 and "
                "activate it) and start again"
            )
            % wrong_python(sys.version_info)
        )
    say("This is Python %d.%d; continuing with %s" % (sys.version_info[0], sys.version_info[1], python))
    os.execv(python, [python, os.path.abspath(__file__)] + arguments)


# ------------------------------------------------------------------------------------------ choice of the PyTorch build

WheelChoice = collections.namedtuple("WheelChoice", "build notice")  # notice: a sentence for the user, or None


def choose_wheels(nvidia_smi):
    """Choose the PyTorch build for the GPUs.

    Args:
        nvidia_smi: its output, a line "7.5, 580.65.06" per GPU or the plain table; None without a GPU.

    Returns a WheelChoice. PyTorch's default build is for CUDA 13: compute capability 7.5 (Turing) and later, driver 580
    or newer. Its CUDA 12.6 build supports 5.0 (Maxwell) to 9.0 with driver 525 or newer, its CUDA 12.8 build also
    Blackwell (10.0 and later).
    """
    if nvidia_smi is None:
        return WheelChoice("cpu", None)
    cards = [(int(major), int(minor)) for major, minor in re.findall(r"(?m)^\s*(\d+)\.(\d+),", nvidia_smi)]
    drivers = [int(n) for n in re.findall(r"(?m)(?:^[^,\n]*, |Driver Version: )(\d+)\.\d", nvidia_smi)]
    if not drivers:
        return WheelChoice("cpu", "nvidia-smi is installed but finds no working GPU (%s)" % _last_line(nvidia_smi))
    # The plain table has no compute capability: assume Turing.
    driver, newest, oldest = min(drivers), max(cards or [(7, 5)]), min(cards or [(7, 5)])
    if newest < (5, 0):
        words = "No PyTorch build supports a GPU of compute capability %d.%d: training will run on the CPU"
        return WheelChoice("cpu", words % newest)
    if driver < 525:
        words = "NVIDIA's driver %d is too old for every PyTorch build: update it to 580 or newer, or train on the CPU"
        return WheelChoice("cu126", words % driver)
    # One build must serve all GPUs: prefer the newest one.
    if newest >= (10, 0) and driver >= 580:
        notice = (
            "The GPU of compute capability %d.%d is too old for the PyTorch build that the newer GPU needs" % oldest
        )
        return WheelChoice("default", notice if oldest < (7, 5) else None)
    if newest >= (10, 0):
        return WheelChoice("cu128", None)
    return WheelChoice("cu126" if oldest < (7, 5) or driver < 580 else "default", None)


def index_of(build):
    """Return the package index URL of a PyTorch build; None for the default build, which is on PyPI."""
    return None if build == "default" else "https://download.pytorch.org/whl/" + build


def _last_line(text):
    """Return the last line that is not blank, shortened for use inside a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    return lines[-1].rstrip(".")[:200]


def read_nvidia_smi():
    """Return the output of nvidia-smi for `choose_wheels`; None if there is no GPU."""
    query = ["nvidia-smi", "--query-gpu=compute_cap,driver_version", "--format=csv,noheader"]
    said = None
    for command in (query, ["nvidia-smi"]):  # drivers before 2021 have no compute_cap: use the table
        try:  # nvidia-smi hangs if a GPU has fallen off the bus
            process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20)
        except subprocess.TimeoutExpired:
            said = "no answer within 20 seconds"
            continue
        except OSError:
            return None
        said = process.stdout.decode("utf-8", "replace")
        if process.returncode == 0:
            return None if "No devices were found" in said else said
    return said


def is_answering(url, seconds):
    """Return whether a URL responds within `seconds`."""
    question = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1])"
    try:
        # A child process, because a DNS lookup has no timeout of its own.
        command = [sys.executable, "-c", question, url]
        return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=seconds).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def fall_back_if_unreachable(choice):
    """Return the choice, or the default build if PyTorch's own index does not respond; print a notice, if any."""
    if choice.notice:
        say(choice.notice)
    if choice.build == "default" or is_answering(index_of(choice.build) + "/torch/", 5):
        return choice
    if choice.build == "cpu":
        notice = (
            "PyTorch's CPU package index does not respond: using the default build, which is larger and works as well"
        )
    else:
        notice = (
            "%s does not respond: using the default build, which does not support this GPU with this driver, "
            "so training will run on the CPU. When the index is reachable, delete .venv and start again"
        ) % index_of(choice.build)
    say(notice)
    return WheelChoice("default", None)


# ------------------------------------------------------------------------------------------------------- state of .venv


def read_stamp():
    """Return the record of this folder's set-up, with the PyTorch builds "wanted" and "installed"; None if invalid."""
    try:
        with open(STAMP) as file:
            stamp = json.load(file)
        return stamp if {"wanted", "installed"} <= set(stamp) and stamp.get("root", ROOT) == ROOT else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def is_build_good(stamp, wanted):
    """Return whether the installed build of a stamp is usable for the build `wanted` now.

    A CUDA build stays when no GPU is found: it runs on the CPU as well, and the folder may be shared with a machine
    that has the GPU.
    """
    return wanted in (stamp["wanted"], stamp["installed"], "cpu")


def ask_venv(extras):
    """Return the requirements that are missing in .venv; None if its Python does not start."""
    question = (
        "import json, sys; sys.path.insert(0, %r); import bootstrap as b; "
        "print(json.dumps(b.missing_requirements(b.read_requirements(%r))))"
    )
    command = [VENV_PYTHON, "-B", "-c", question % (os.path.dirname(os.path.abspath(__file__)), sorted(extras))]
    try:
        return json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL).decode())
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def is_ready(extras, wanted):
    """Return whether .venv can be used unchanged; without a stamp (created by hand) the modules suffice."""
    if os.path.exists(UNFINISHED) or ask_venv(extras) != []:
        return False
    stamp = read_stamp()
    return is_build_good(stamp, wanted) if stamp else not os.path.exists(STAMP)


# --------------------------------------------------------------------------------------------------------- installation


def ensure_python(extras):
    """Return the path of a Python with the requirements of the runtime and of `extras`; create .venv if necessary."""
    if not is_in_venv() and not missing_requirements(read_requirements(extras)):
        return sys.executable
    # A Mac has no CUDA, and PyPI has the right build.
    choice = WheelChoice("default", None) if sys.platform == "darwin" else choose_wheels(read_nvidia_smi())
    if is_ready(extras, choice.build):
        return VENV_PYTHON
    folder = VENV if os.path.isdir(VENV) else ROOT
    if not os.access(folder, os.W_OK):
        raise SetupError(
            (
                "%s is not writable, so its environment cannot be completed: let its owner (%s) start this, or "
                "copy %s, without .venv, to a folder of your own and start it there"
            )
            % (folder, owner_of(folder), ROOT)
        )
    with locked() as lock:
        if not is_ready(extras, choice.build):  # another process may have completed it while this one waited
            install(set(extras), choice, lock)
    return VENV_PYTHON


def owner_of(folder):
    """Return the name of a folder's owner, or the number if it has no name."""
    import pwd

    number = os.stat(folder).st_uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return "user %d" % number


@contextlib.contextmanager
def locked():
    """Hold the lock of .venv and yield its open file; print a line if another process holds it."""
    import fcntl

    os.makedirs(VENV, exist_ok=True)
    # The lock file is never deleted: a waiting process would lock the deleted one.
    with open(LOCK, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another setup is running in %s: waiting for it to finish" % VENV)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def install(extras, choice, lock):
    """Install the requirements of setup.cfg into .venv.

    The file UNFINISHED exists from before the first change until after the last. If the set-up fails before anything is
    changed, it is removed, so that being offline never costs a working environment.
    """
    was_interrupted, old = os.path.exists(UNFINISHED), read_stamp()
    # Written before the first change: even SIGKILL leaves it in .venv.
    open(UNFINISHED, "a").close()
    try:
        if was_interrupted and can_run_pip():
            forget_half_installed()
        missing = ask_venv(extras) if can_run_pip() else None
        has_torch = missing is not None and not any(name.startswith("torch") for name in missing)
        wanted, installed, needs_torch = decide_build(choice, old, has_torch)
        check_disk(shutil.disk_usage(VENV).free, BUILDS[installed].disk_bytes if needs_torch else GIB // 2)
        if missing is None:
            create_venv()
        run_stages(plan_stages(extras, installed, needs_torch, has_torch), lock)
    except NothingChanged as error:
        if not was_interrupted:
            os.unlink(UNFINISHED)
        raise SetupError(str(error))  # noqa: B904 - "from" is no syntax of Python 2.7
    finish({"root": ROOT, "wanted": wanted, "installed": installed})


def decide_build(choice, old, has_torch):
    """Return (build for the GPUs, build to have, whether PyTorch must be installed for it); `old` is the stamp."""
    if has_torch and old is None:  # created by hand: keep the user's build
        return choice.build, choice.build, False
    if has_torch and is_build_good(old, choice.build):
        return old["wanted"], old["installed"], False
    reachable = fall_back_if_unreachable(choice)
    return choice.build, reachable.build, not has_torch or reachable.build != old["installed"]


def finish(stamp):
    """Write the stamp atomically and remove UNFINISHED."""
    with open(STAMP + ".new", "w") as file:
        json.dump(stamp, file)
    os.replace(STAMP + ".new", STAMP)
    os.unlink(UNFINISHED)


def check_disk(free_bytes, needed_bytes):
    """Raise NothingChanged if the free disk space is too small for the installation."""
    if free_bytes < needed_bytes:
        raise NothingChanged(
            (
                "The installation needs %.1f GB of free space at %s, but only %.1f GB are free: free disk space, "
                "or move the folder to another disk"
            )
            % (needed_bytes / GIB, ROOT, free_bytes / GIB)
        )


def can_run_pip():
    """Return whether .venv has a suitable Python with a working pip."""
    question = "import sys, pip._internal.cli.main; print(*sys.version_info[:2])"
    try:
        version = subprocess.check_output([VENV_PYTHON, "-c", question], stderr=subprocess.DEVNULL).split()
        return is_suitable([int(n) for n in version])
    except (OSError, ValueError, subprocess.CalledProcessError):
        return False


def create_venv():
    """Recreate .venv with the running Python: with venv, else virtualenv, else venv and this Python's own pip."""
    clear_venv()
    python = getattr(sys, "_base_executable", sys.executable) if is_in_venv() else sys.executable
    say("[1/3] Creating the environment %s with Python %s" % (VENV, sys.version.split()[0]))
    if has_module("ensurepip"):
        commands = [[python, "-m", "venv", VENV]]
    elif has_module("virtualenv"):
        commands = [[python, "-m", "virtualenv", "--quiet", VENV]]
    elif has_module("pip") and has_module("venv"):
        commands = [
            [python, "-m", "venv", "--without-pip", VENV],
            [python, "-m", "pip", "--python", VENV_PYTHON, "install", "--quiet", "pip"],
        ]
    else:
        commands = []
    outputs = []
    for command in commands:
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        outputs.append(process.stdout)
        if process.returncode != 0:
            break
    if not can_run_pip():
        reason = explain_pip(outputs[-1])[1] if outputs else "it has no ensurepip, virtualenv or pip"
        raise SetupError(
            (
                "The Python at %s could not create an environment (%s): install its venv package (on Debian and "
                "Ubuntu: apt install python%d.%d-venv) or virtualenv"
            )
            % ((python, reason) + sys.version_info[:2])
        )


def has_module(name):
    """Return whether the running Python has a module, without importing it."""
    import importlib.util

    return importlib.util.find_spec(name) is not None


def clear_venv():
    """Empty .venv except for the lock and UNFINISHED; raise SetupError if it is no virtual environment."""
    kept = {os.path.basename(LOCK), os.path.basename(UNFINISHED)}
    names = set(os.listdir(VENV)) - kept
    # Never empty a folder of the user that happens to be called .venv.
    if names and not {"pyvenv.cfg", "bin", "lib"} & names:
        raise SetupError("%s is not a virtual environment: move that folder away" % VENV)
    for name in names:
        path = os.path.join(VENV, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def forget_half_installed():
    """Delete the metadata of damaged packages, so that pip reinstalls them.

    A package is damaged if its files differ from its own file list, as after a killed pip.
    """
    import importlib.metadata

    # pip considers a package installed once its metadata exist, which may be written before its modules.
    library = os.path.join(VENV, "lib")
    folders = [os.path.join(library, name, "site-packages") for name in os.listdir(library)]
    for distribution in importlib.metadata.distributions(path=folders):
        files = distribution.files or []
        if not files or any(_is_damaged(file) for file in files):
            say("Reinstalling %s: the installation is incomplete" % distribution.metadata["Name"])
            shutil.rmtree(str(distribution._path), ignore_errors=True)


def _is_damaged(file):
    """Return whether an installed file is missing or has another size than its package records."""
    try:
        return file.size is not None and os.stat(str(file.locate())).st_size != file.size
    except OSError:
        return True


# -------------------------------------------------------------------------------------------------------------- pip


def plan_stages(extras, build, needs_torch, has_torch):
    """Return [(message, arguments of pip)]: PyTorch from its own index first, then the rest and the package itself."""
    torch = [requirement for requirement in read_requirements([]) if requirement.startswith("torch")]
    torch += ["--index-url", index_of(build)] if index_of(build) else []
    words = "[2/3] Installing PyTorch %s; a few minutes on a fast connection" % BUILDS[build].words
    stages = []
    if needs_torch and has_torch:  # the old build is removed only after the download
        stages.append(("Replacing PyTorch with another build", ["--force-reinstall", "--no-deps"] + torch))
    if needs_torch:
        stages.append((words, torch))
    package = ".[%s]" % ",".join(sorted(extras)) if extras else "."
    return stages + [("[3/3] Installing the other libraries: 100 to 250 MB", ["--editable", package])]


def run_stages(stages, lock):
    """Run pip for each stage; raise NothingChanged only if the first stage fails."""
    for number, (words, arguments) in enumerate(stages):
        say(words)
        try:
            run_pip(["install"] + arguments, lock)
        except NothingChanged as error:
            raise error if number == 0 else SetupError(str(error))  # noqa: B904 - as above


def run_pip(arguments, lock):
    """Run .venv's pip with its progress on stderr; raise SetupError, with one sentence, if it fails.

    pip inherits the lock: if this process is killed, the next set-up still waits until pip has ended.
    """
    command = [VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input"] + arguments
    environment = dict(os.environ, PIP_USER="0")  # a configured user = true is an error inside an environment
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=2, stderr=subprocess.PIPE, pass_fds=(lock.fileno(),), text=True
    )
    errors = []
    for line in process.stderr:
        errors.append(line)
        # stderr is collected for explain_pip, so pip's own warnings are not shown.
        if line.startswith("WARNING: Retrying"):
            say("The package index does not respond; pip retries")
    if process.wait() != 0:
        is_harmless, reason = explain_pip("".join(errors))
        raise (NothingChanged if is_harmless else SetupError)(reason)


def explain_pip(output):
    """Return (whether nothing was changed, reason) for a failed pip, from its output."""
    if re.search(r"No space left|Errno 28|Disk quota", output):
        return False, (
            (
                "The disk became full during installation: free disk space at %s and in the folder for temporary "
                "files (%s), or set TMPDIR to another disk, and start again"
            )
            % (ROOT, os.environ.get("TMPDIR", "/tmp"))
        )
    if re.search(r"Read-only file system|Permission denied|Errno 13|Errno 30", output):
        return False, "pip has no write permission (%s): copy the folder to a place that you own" % _last_line(output)
    network = (
        "connection|distribution found for setuptools|name resolution|name or service|timed? ?out|max retries|"
        "unreachable|proxy|SSL|IncompleteRead"
    )
    if re.search(network, output, re.IGNORECASE):
        return True, (
            "The package index could not be reached: check the network (and, where you use them, HTTPS_PROXY "
            "and PIP_INDEX_URL) and start again; completed downloads are kept"
        )
    absent = re.search(r"No matching distribution found for (\S+)", output)
    if absent:
        system = os.uname()
        machine = "%s %s, Python %d.%d" % ((system[0], system[4]) + sys.version_info[:2])
        return True, (
            "The package index has no %s for this machine (%s), or cannot be reached: check the network and, where you "
            "use it, PIP_INDEX_URL" % (absent.group(1), machine)
        )
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")]
    return False, "pip failed: %s" % _last_line("\n".join(errors) or output)


# ----------------------------------------------------------------------------------------------------- command line


def main(arguments):
    """Print the path of the Python to use, and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Create the Python environment if needed and print the path of its Python."
    )
    parser.add_argument(
        "--extras", default="", help="optional extras to install: synthesis, test, or both separated by a comma"
    )
    extras = [extra for extra in parser.parse_args(arguments).extras.split(",") if extra]
    try:
        if not is_suitable(sys.version_info):
            hand_over_to_suitable_python(arguments)
        known = sorted(read_setup()["options.extras_require"])
        if not set(extras) <= set(known):
            parser.error("--extras knows %s, not %s" % (", ".join(known), ",".join(extras)))
        print(ensure_python(extras))
        return 0
    except SetupError as error:
        say("error: %s." % error)
    except OSError as error:
        say("error: %s." % explain_pip(str(error))[1])
    except KeyboardInterrupt:
        say("Interrupted; the next start continues from here.")
        return 130
    return EXIT_RESOURCES


if __name__ == "__main__":
    mend_streams()
    sys.exit(main(sys.argv[1:]))
