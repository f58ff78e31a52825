"""A disk that fails for a moment: what it did not give is read again, after a pause."""
from __future__ import annotations

import errno
import time
from typing import Callable, TypeVar

from eagle3.stage import log

PAUSES = (1, 4, 15)  # s
# What a network's file system says while its server or its path is away; others do not pass (ENOENT, EACCES, ...)
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN,
           errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EREMOTEIO, errno.ESHUTDOWN}
Read = TypeVar("Read")


def patiently(read: Callable[[], Read], what) -> Read:
    """read(), again after each of PAUSES where it raises an OSError that may pass. Raises what the last try raises.

    It must open the file itself: a handle that went stale stays so.
    """
    for pause in PAUSES:
        try:
            return read()
        except OSError as error:
            if error.errno not in PASSING:
                raise
            log(f"{what}: {error.strerror}; read again in {pause} s")
            time.sleep(pause)
    return read()
