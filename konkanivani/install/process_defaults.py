"""Defaults of a process: streams, C allocator, OpenMP, oneDNN and PyTorch's CUDA allocator.

Standard library only: training_scripts/bootstrap.py applies them before torch is imported.
"""

import ctypes
import io
import os
import pwd
import sys
from collections.abc import MutableMapping

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
