"""How the C library's allocator gives memory back to the system."""

import ctypes

MIB = 2**20
MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h


def map_large_blocks() -> bool:
    """Has blocks of 1 MiB and more mapped one by one from now on, so that a freed one goes back to the system.

    glibc by itself raises that size with the blocks it sees freed, up to 32 MiB, and keeps smaller ones in a heap. A
    long utterance's activations, of 15 MB each, leave holes there: with ten minutes, five times the memory that lives.
    False where the C library knows no such setting; may be called again.
    """
    try:
        return ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, MIB) == 1
    except (AttributeError, OSError):
        return False
