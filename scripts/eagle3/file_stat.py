"""Whether a file is still the one that was looked at."""
from __future__ import annotations

import os
import time
from pathlib import Path

SETTLED_NS = 2 * 10 ** 9  # a file changed later than that before it was read could change again without a newer time


def stat_of(path: Path | str) -> list[int] | None:
    """[size, time of change of its content, of anything of it (ns), inode]; None where there is no such file.

    Tools can set the first time back, and put another file in the place of one; the second time and the inode tell.
    """
    try:
        return numbers(os.stat(path))
    except OSError:
        return None


def numbers(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def settled(stat: list[int] | None) -> bool:
    """Whether any later change will show in the times."""
    return stat is not None and time.time_ns() - max(stat[1:3]) > SETTLED_NS
