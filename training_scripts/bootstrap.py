"""Finds or makes the Python environment that KonkaniVani runs in.

    python3 training_scripts/bootstrap.py --extras synthesis,test

prints the path of the Python to use, and nothing else, on stdout; progress goes to stderr. Every script calls
`rerun_under_venv()` first. Exit codes: 0 done, 2 usage, 6 no environment could be made (one sentence says why).

Standard library only. The syntax stays that of Python 2.7, hence no annotations and no f-strings: on a Python that is
too old this file must still be able to say so, or to hand over to a newer one.
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

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 14)  # what the PyTorch releases of setup.cfg are built for
EXIT_RESOURCES = 6
RERUN_MARK = "KONKANIVANI_RERUN"
HOW_TO_SET_UP = "Run ./run_training_memory_optimized.sh or python3 training_scripts/bootstrap.py in %s" % ROOT

# The module that a distribution brings, where it is not the distribution's name with "-" turned to "_".
MODULE_NAMES = {"PyYAML": "yaml", "import-linter": "importlinter", "nvidia-ml-py": "pynvml", "pytest-xdist": "xdist"}

# Bytes: larger blocks are mapped one by one, and go back when they are freed. Smaller ones come faster from the heap;
# a run under a memory budget sets a lower threshold itself (konkanivani/memory/monitor.py).
MALLOC_THRESHOLD = 8 * 1024 * 1024
MALLOC_TRIM_THRESHOLD = 512 * 1024 * 1024  # the heap's free end is kept up to so much: the next step takes it again
MALLOC_TOP_PAD = 16 * 1024 * 1024  # by which the heap grows beyond what is asked for, and which it keeps

GIB = 1024**3
Build = collections.namedtuple("Build", "words disk_bytes")
BUILDS = {
    "default": Build("with its CUDA libraries: about 2.8 GB to download, 4.6 GB on disk", 7 * GIB),
    "cu128": Build("for CUDA 12.8: about 3 GB to download, 7 GB on disk", 10 * GIB),
    "cu126": Build("for CUDA 12.6: about 2.6 GB to download, 5 GB on disk", 7 * GIB),
    "cpu": Build("without CUDA: about 200 MB to download, 700 MB on disk", 2 * GIB),
}


class SetupError(Exception):
    """No environment could be made; the text is the one sentence that a person reads."""


class NothingChanged(SetupError):
    """The set-up failed before it changed anything."""


def say(text):
    """Prints one line of progress; stdout is kept for the answer."""
    print(text, file=sys.stderr)
    sys.stderr.flush()


# ---------------------------------------------------------------------------------------- what has to be installed


def read_setup():
    """setup.cfg, as a ConfigParser."""
    import configparser

    setup = configparser.ConfigParser()
    setup.read(os.path.join(ROOT, "setup.cfg"), encoding="utf-8")
    return setup


def read_requirements(extras):
    """Requirement strings of setup.cfg: the runtime's, then those of each extra in `extras`."""
    setup = read_setup()
    texts = [setup.get("options", "install_requires")]
    texts += [setup.get("options.extras_require", extra) for extra in extras]
    return [line.strip() for text in texts for line in text.splitlines() if line.strip()]


def is_version_in(version, bounds):
    """Whether a version such as "2.11.0+cu126" is within bounds such as ">=2.10,<2.12" (only >= and < are used)."""
    numbers = [int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3]]
    for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", bounds):
        limit = [int(n) for n in bound.split(".")]
        if (operator == ">=" and numbers < limit) or (operator == "<" and numbers >= limit):
            return False
    return True


def missing_requirements(requirements):
    """Those of `requirements` that the running Python lacks or has in another version; imports none of them."""
    import importlib.metadata
    import importlib.util

    missing = []
    for requirement in requirements:
        name, bounds = re.match(r"([\w.-]+)\s*(.*)", requirement).groups()
        if importlib.util.find_spec(MODULE_NAMES.get(name, name.replace("-", "_"))) is None:
            missing.append(name)
        elif bounds:
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue  # built from source without metadata: whoever does that knows the version
            if not is_version_in(version, bounds):
                missing.append("%s%s (found %s)" % (name, bounds, version))
    return missing


# ------------------------------------------------------------------------------------------------- at a script's head


def mend_streams():
    """Opens /dev/null where stdin, stdout or stderr was closed by whoever started this, for all programs that follow.

    Else the next file opened has the stream's number, and what native code prints goes into a checkpoint. What stdout's
    encoding cannot write, as a path may hold it, is escaped.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # has the lowest free number, this one
            getattr(os, "set_inheritable", lambda *_: None)(number, True)
        if getattr(sys, name) is None:
            stream = io.open(number, "w" if number else "r", encoding="utf-8", errors="replace", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, "__%s__" % name, stream)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def set_process_defaults(environment):
    """What PyTorch and its libraries read when they are loaded; a user's own settings stay."""
    set_allocator_defaults(environment)
    # Threads that spin while they wait make training a hundred times slower on a core that they have to share, be it
    # with the audio workers; sleeping ones cost a tenth on a core of their own (docs/experiments.md).
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    # oneDNN keeps the kernels of the last 1,024 shapes, and utterances of mixed lengths are all shapes of their own.
    environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    if not has_name(environment):
        environment["LOGNAME"] = "uid-%d" % os.getuid()


def has_name(environment):
    """Whether who runs this has a name: in a container it may be a bare number, of which PyTorch makes a KeyError."""
    import pwd

    if any(environment.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):  # as getpass.getuser() asks
        return True
    try:
        return bool(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        return False


def add_huge_pages(environment):
    """Has glibc ask for pages of 2 MiB, for a program that is started with `environment`; a user's own choice stays.

    A step frees its gradients and takes them again, 25,000 pages of 4 KiB for 25 M parameters: a fortieth of its time
    (docs/experiments.md). glibc reads this only as a program starts, so a Python that needs no other one goes without.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        environment["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, "glibc.malloc.hugetlb=1"]))


def set_allocator_defaults(environment):
    """Lets CUDA's memory grow in segments, which spares small cards fragmentation; a user's own setting stays.

    PyTorch reads one of these two names, depending on its release, and when it is first used: hence before the import.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if not any(name in environment for name in names):
        environment.update((name, "expandable_segments:True") for name in names)


def set_malloc_options(environment):
    """Has glibc return freed tensors' memory to the system, and keep one heap for all threads; whether it was told so.

    By itself malloc soon keeps blocks of up to 32 MiB in its heap, where freed tensors of mixed sizes leave holes that
    none of the next fit: more memory is resident than is in use (docs/experiments.md). And it gives each thread a heap,
    whose holes no other thread fills: concurrent micro-batches would need 400 MiB more. A user's own setting stays.
    A heap that grows to the byte and shrinks at once has its pages cleared again and again, for a tenth of a
    step: it grows by more than is asked for, and keeps its free end, which the next step's gradients take. Not by the
    environment: that counts only before a process starts, and other programs would inherit it. Elsewhere than on glibc
    nothing happens.
    """
    m_trim_threshold, m_top_pad, m_mmap_threshold, m_arena_max = -1, -2, -3, -8  # malloc.h
    options = []
    if not is_malloc_set(environment, "mmap_threshold", "trim_threshold"):
        # Either one alone ends the growth of both.
        options += [(m_trim_threshold, MALLOC_TRIM_THRESHOLD), (m_mmap_threshold, MALLOC_THRESHOLD)]
        if not is_malloc_set(environment, "top_pad"):
            options.append((m_top_pad, MALLOC_TOP_PAD))
    if not is_malloc_set(environment, "arena_max"):
        options.append((m_arena_max, 1))
    try:
        import ctypes

        is_glibc = os.confstr("CS_GNU_LIBC_VERSION").startswith("glibc")
        mallopt = ctypes.CDLL(None).mallopt
    except (ImportError, AttributeError, OSError, ValueError, TypeError):  # another system, or another C library
        return False
    return is_glibc and bool(options) and all([mallopt(option, value) for option, value in options])


def is_malloc_set(environment, *options):
    """Whether a user has set one of these of glibc's options, by either of its ways."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    variables = {variable.rstrip("_") for variable in environment}  # MALLOC_ARENA_MAX, but MALLOC_TRIM_THRESHOLD_
    return any("glibc.malloc.%s" % name in tunables or "MALLOC_%s" % name.upper() in variables for name in options)


def rerun_under_venv():
    """Returns if the running Python has all that is needed; else runs the same command line under .venv instead.

    Ends the process with exit code 6 and one sentence when there is no environment to run in. Also mends the
    streams, puts the repository's root first on sys.path and sets the allocators' defaults.
    """
    mend_streams()
    sys.excepthook = end_in_a_line
    sys.path.insert(0, ROOT)
    set_process_defaults(os.environ)
    was_rerun = os.environ.pop(RERUN_MARK, None)  # popped, so that processes started later may be rerun themselves
    missing = missing_requirements(read_requirements([])) if is_suitable(sys.version_info) else None
    is_unfinished = os.path.exists(UNFINISHED)
    if missing == [] and not (is_in_venv() and is_unfinished):
        set_malloc_options(os.environ)
        return
    if os.path.exists(VENV_PYTHON) and not is_unfinished and not is_in_venv() and not was_rerun:
        os.environ[RERUN_MARK] = "1"
        add_huge_pages(os.environ)
        command_line = getattr(sys, "orig_argv", [None] + sys.argv)  # with the interpreter's own flags, where known
        os.execv(VENV_PYTHON, [VENV_PYTHON] + command_line[1:])
    say("error: %s. %s, then start again." % (why_not(missing, is_unfinished), HOW_TO_SET_UP))
    sys.exit(EXIT_RESOURCES)


def end_in_a_line(kind, error, trace):
    """Ends the process where Ctrl-C comes amid imports or the reading of flags, as the scripts do later."""
    if issubclass(kind, KeyboardInterrupt):
        say("Interrupted.")
        os._exit(130)
    sys.__excepthook__(kind, error, trace)


def why_not(missing, is_unfinished):
    """What keeps a script from running, as a clause."""
    if is_unfinished:
        return "The environment %s is incomplete: its installation was interrupted, or is still running" % VENV
    if missing is None:
        return wrong_python(sys.version_info)
    return "The Python at %s does not have %s" % (sys.executable, ", ".join(missing))


# ------------------------------------------------------------------------------------------------- which Python to use


def is_suitable(version):
    """Whether PyTorch is built for this (major, minor, ...) version of Python."""
    return OLDEST_PYTHON <= tuple(version[:2]) <= NEWEST_PYTHON


def wrong_python(version):
    """That this version of Python cannot be used, as a clause."""
    numbers = tuple(version[:2]) + OLDEST_PYTHON + NEWEST_PYTHON
    return "This is Python %d.%d, and KonkaniVani needs Python %d.%d to %d.%d" % numbers


def is_in_venv():
    """Whether the running Python is that of .venv."""
    return os.path.realpath(sys.prefix) == os.path.realpath(VENV)


def find_suitable_python():
    """Path of the .venv's Python, else of the newest suitable one on PATH that can make environments, else None."""
    question = (
        "import sys; from importlib.util import find_spec as f; "
        "print(sys.version_info[0], sys.version_info[1], int(any(map(f, ['ensurepip', 'virtualenv', 'pip']))),"
        " sys.executable)"
    )
    names = ["python3.%d" % minor for minor in range(NEWEST_PYTHON[1], OLDEST_PYTHON[1] - 1, -1)]
    for name in [VENV_PYTHON] + names:
        try:  # asked, not only found: a version manager's stand-in may lie on PATH with nothing behind it
            answer = subprocess.check_output([name, "-c", question], stderr=subprocess.STDOUT).decode().split(None, 3)
        except (OSError, subprocess.CalledProcessError):
            continue
        if is_suitable([int(answer[0]), int(answer[1])]) and answer[2] == "1":
            return answer[3].strip()
    return None


def hand_over_to_suitable_python(arguments):
    """Runs this file again under a Python that PyTorch is built for; raises SetupError where there is none."""
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


# ------------------------------------------------------------------------------------------------------ PyTorch's build

WheelChoice = collections.namedtuple("WheelChoice", "build notice")  # notice: what is to be said of it, or None


def choose_wheels(nvidia_smi):
    """WheelChoice from what nvidia-smi said: "7.5, 580.65.06" for each card, or its plain table, or None (no card).

    PyTorch's default build is for CUDA 13: architectures from 7.5 (Turing) on, driver 580 or newer. Its CUDA 12.6
    build reaches from 5.0 (Maxwell) to 9.0 with driver 525 or newer, its CUDA 12.8 build has Blackwell (10.0 on).
    """
    if nvidia_smi is None:
        return WheelChoice("cpu", None)
    cards = [(int(major), int(minor)) for major, minor in re.findall(r"(?m)^\s*(\d+)\.(\d+),", nvidia_smi)]
    drivers = [int(n) for n in re.findall(r"(?m)(?:^[^,\n]*, |Driver Version: )(\d+)\.\d", nvidia_smi)]
    if not drivers:
        return WheelChoice("cpu", "nvidia-smi is installed but finds no working GPU (%s)" % _last_line(nvidia_smi))
    driver, newest, oldest = min(drivers), max(cards or [(7, 5)]), min(cards or [(7, 5)])
    if newest < (5, 0):
        words = "No PyTorch build supports a GPU of compute capability %d.%d: training will run on the CPU"
        return WheelChoice("cpu", words % newest)
    if driver < 525:
        words = "NVIDIA's driver %d is too old for every PyTorch build: update it to 580 or newer, or train on the CPU"
        return WheelChoice("cu126", words % driver)
    if newest >= (10, 0) and driver >= 580:
        notice = (
            "The GPU of compute capability %d.%d is too old for the PyTorch build that the newer GPU needs" % oldest
        )
        return WheelChoice("default", notice if oldest < (7, 5) else None)
    if newest >= (10, 0):
        return WheelChoice("cu128", None)
    return WheelChoice("cu126" if oldest < (7, 5) or driver < 580 else "default", None)


def index_of(build):
    """Address of the index that has a build of PyTorch; None for the default one, which is on pip's own."""
    return None if build == "default" else "https://download.pytorch.org/whl/" + build


def _last_line(text):
    """The last line that says something, for use inside a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    return lines[-1].rstrip(".")[:200]


def read_nvidia_smi():
    """What nvidia-smi says of the cards, as choose_wheels wants it; None if there is no card to ask about."""
    query = ["nvidia-smi", "--query-gpu=compute_cap,driver_version", "--format=csv,noheader"]
    said = None
    for command in (query, ["nvidia-smi"]):  # a driver from before 2021 knows no compute_cap: its table must do
        try:  # it hangs on a card that has fallen off the bus
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
    """Whether a web address answers in time. A process, because looking up a name has no time limit of its own."""
    question = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1])"
    try:
        command = [sys.executable, "-c", question, url]
        return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=seconds).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def fall_back_if_unreachable(choice):
    """The choice itself, or the default build where PyTorch's own index does not answer; says what is remarkable."""
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


# -------------------------------------------------------------------------------------------------- is .venv complete?


def read_stamp():
    """What is remembered of a set-up of this folder: the builds of PyTorch "wanted" and "installed"; else None."""
    try:
        with open(STAMP) as file:
            stamp = json.load(file)
        return stamp if {"wanted", "installed"} <= set(stamp) and stamp.get("root", ROOT) == ROOT else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def is_build_good(stamp, wanted):
    """Whether the build that a stamp tells of will do where another one is wanted now, or the same.

    A CUDA build stays when no card is seen: it runs on the CPU as well, and the folder may be shared with a machine
    that has the card.
    """
    return wanted in (stamp["wanted"], stamp["installed"], "cpu")


def ask_venv(extras):
    """The requirements that .venv's Python lacks; None if it does not even start."""
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
    """Whether .venv can be used as it is. One that was made by hand has no stamp: then having the modules is enough."""
    if os.path.exists(UNFINISHED) or ask_venv(extras) != []:
        return False
    stamp = read_stamp()
    return is_build_good(stamp, wanted) if stamp else not os.path.exists(STAMP)


# -------------------------------------------------------------------------------------------------- making it complete


def ensure_python(extras):
    """Path of a Python that has the runtime's modules and those of `extras`; makes .venv where none has."""
    if not is_in_venv() and not missing_requirements(read_requirements(extras)):
        return sys.executable
    # A Mac has no CUDA, and pip's own index has its right build.
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
        if not is_ready(extras, choice.build):  # it may have become so while this process waited
            install(set(extras), choice, lock)
    return VENV_PYTHON


def owner_of(folder):
    """The name of a folder's owner, or the number where it has none."""
    import pwd

    number = os.stat(folder).st_uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return "user %d" % number


@contextlib.contextmanager
def locked():
    """Holds the one lock of .venv, as an open file; says so if it has to wait."""
    import fcntl

    os.makedirs(VENV, exist_ok=True)
    with open(LOCK, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another setup is running in %s: waiting for it to finish" % VENV)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def install(extras, choice, lock):
    """Brings .venv to what setup.cfg asks for. The mark UNFINISHED stands from before the first change to the last.

    A set-up that fails before anything was changed takes it away, so that being offline never costs a working
    environment.
    """
    was_interrupted, old = os.path.exists(UNFINISHED), read_stamp()
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
    """(build that the cards want, build to have, whether PyTorch has to be installed for that); `old` is a stamp."""
    if has_torch and old is None:  # made by hand: whoever did that chose the build
        return choice.build, choice.build, False
    if has_torch and is_build_good(old, choice.build):
        return old["wanted"], old["installed"], False
    reachable = fall_back_if_unreachable(choice)
    return choice.build, reachable.build, not has_torch or reachable.build != old["installed"]


def finish(stamp):
    """Writes the stamp, whole or not at all, and takes the mark away."""
    with open(STAMP + ".new", "w") as file:
        json.dump(stamp, file)
    os.replace(STAMP + ".new", STAMP)
    os.unlink(UNFINISHED)


def check_disk(free_bytes, needed_bytes):
    """Raises NothingChanged if the disk is too full for the installation."""
    if free_bytes < needed_bytes:
        raise NothingChanged(
            (
                "The installation needs %.1f GB of free space at %s, but only %.1f GB are free: free disk space, "
                "or move the folder to another disk"
            )
            % (needed_bytes / GIB, ROOT, free_bytes / GIB)
        )


def can_run_pip():
    """Whether .venv has a suitable Python with a pip that starts."""
    question = "import sys, pip._internal.cli.main; print(*sys.version_info[:2])"
    try:
        version = subprocess.check_output([VENV_PYTHON, "-c", question], stderr=subprocess.DEVNULL).split()
        return is_suitable([int(n) for n in version])
    except (OSError, ValueError, subprocess.CalledProcessError):
        return False


def create_venv():
    """Makes .venv anew with the running Python: by venv, else virtualenv, else venv and this Python's own pip."""
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
    """Whether the running Python has a module, without importing it."""
    import importlib.util

    return importlib.util.find_spec(name) is not None


def clear_venv():
    """Empties .venv but for the lock and the mark; refuses a folder that is no environment of ours."""
    kept = {os.path.basename(LOCK), os.path.basename(UNFINISHED)}
    names = set(os.listdir(VENV)) - kept
    if names and not {"pyvenv.cfg", "bin", "lib"} & names:
        raise SetupError("%s is not a virtual environment: move that folder away" % VENV)
    for name in names:
        path = os.path.join(VENV, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def forget_half_installed():
    """Makes pip install again what a killed pip left in pieces: whatever differs from its own list of files.

    pip takes a package for installed as soon as its metadata lie there, and those may come before its modules.
    """
    import importlib.metadata

    library = os.path.join(VENV, "lib")
    folders = [os.path.join(library, name, "site-packages") for name in os.listdir(library)]
    for distribution in importlib.metadata.distributions(path=folders):
        files = distribution.files or []
        if not files or any(_is_damaged(file) for file in files):
            say("Reinstalling %s: the installation is incomplete" % distribution.metadata["Name"])
            shutil.rmtree(str(distribution._path), ignore_errors=True)


def _is_damaged(file):
    """Whether an installed file is gone or has another size than its package says."""
    try:
        return file.size is not None and os.stat(str(file.locate())).st_size != file.size
    except OSError:
        return True


# -------------------------------------------------------------------------------------------------------------- pip


def plan_stages(extras, build, needs_torch, has_torch):
    """[(words, pip's arguments)]: PyTorch from its own index first, then the rest and the package itself."""
    torch = [requirement for requirement in read_requirements([]) if requirement.startswith("torch")]
    torch += ["--index-url", index_of(build)] if index_of(build) else []
    words = "[2/3] Installing PyTorch %s; a few minutes on a fast connection" % BUILDS[build].words
    stages = []
    if needs_torch and has_torch:  # the build that is there goes only when the other one is downloaded
        stages.append(("Replacing PyTorch with another build", ["--force-reinstall", "--no-deps"] + torch))
    if needs_torch:
        stages.append((words, torch))
    package = ".[%s]" % ",".join(sorted(extras)) if extras else "."
    return stages + [("[3/3] Installing the other libraries: 100 to 250 MB", ["--editable", package])]


def run_stages(stages, lock):
    """Runs pip for each stage. Raises NothingChanged only if that is true: when the first one fails."""
    for number, (words, arguments) in enumerate(stages):
        say(words)
        try:
            run_pip(["install"] + arguments, lock)
        except NothingChanged as error:
            raise error if number == 0 else SetupError(str(error))  # noqa: B904 - as above


def run_pip(arguments, lock):
    """Runs .venv's pip. Its progress is seen as it comes; its errors become one sentence (SetupError).

    pip inherits the lock: should this process be killed, the next set-up still waits until pip has ended.
    """
    command = [VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input"] + arguments
    environment = dict(os.environ, PIP_USER="0")  # a configured user = true is an error inside an environment
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=2, stderr=subprocess.PIPE, pass_fds=(lock.fileno(),), text=True
    )
    errors = []
    for line in process.stderr:
        errors.append(line)
        if line.startswith("WARNING: Retrying"):
            say("The package index does not respond; pip retries")
    if process.wait() != 0:
        is_harmless, reason = explain_pip("".join(errors))
        raise (NothingChanged if is_harmless else SetupError)(reason)


def explain_pip(output):
    """(whether nothing was changed, why) of a pip that failed, from what it wrote."""
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
    """Prints the path of the Python to use; returns the exit code."""
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
