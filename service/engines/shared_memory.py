"""Memory that a server shares with an engine's process: frames are written once and read in place."""

import bisect
import mmap
import os
import tempfile

# Alignment of blocks in bytes: of a cache line, and of the arrays that XLA reads in place.
ALIGNMENT = 64


class SharedMemory:
    """Anonymous memory that two processes map; only the process that writes to it allocates blocks.

    The system gives pages only to what was written. Nothing is left behind when both processes are killed.

    Args:
        descriptor: of the memory, from `create_descriptor`; this object owns it.
        size: bytes.
    """

    def __init__(self, descriptor: int, size: int):
        self.descriptor, self.size = descriptor, size
        self._map = mmap.mmap(descriptor, size)
        self._free = [(0, size)]  # (start, bytes), sorted, without neighbours

    @staticmethod
    def create_descriptor(size: int) -> int:
        """Return a descriptor of new memory, which a child process inherits by ``pass_fds``."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("robojax-engine", os.MFD_CLOEXEC)
        else:  # macOS
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, size)
        return descriptor

    def allocate(self, count: int) -> int | None:
        """Return the start of a new block of `count` bytes; None when no gap is large enough."""
        count = -(-count // ALIGNMENT) * ALIGNMENT
        for index, (start, size) in enumerate(self._free):
            if size >= count:
                self._free[index : index + 1] = [(start + count, size - count)] if size > count else []
                return start
        return None

    def free(self, start: int, count: int) -> None:
        """Free a block of `count` bytes."""
        count = -(-count // ALIGNMENT) * ALIGNMENT
        index = bisect.bisect(self._free, (start, 0))
        if index < len(self._free) and self._free[index][0] == start + count:
            count += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            index -= 1
            before = self._free.pop(index)
            start, count = before[0], before[1] + count
        self._free.insert(index, (start, count))

    def view(self, start: int, count: int) -> memoryview:
        """Return a block as bytes that can be written.

        Raises:
            ValueError: it is not inside of the memory.
        """
        if start < 0 or count < 0 or start + count > self.size:
            raise ValueError(f"a block of {count} bytes at {start} is outside of {self.size} bytes")
        return memoryview(self._map)[start : start + count]

    def close(self) -> None:
        """Close the descriptor; the memory lives until the last array in it is gone."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
