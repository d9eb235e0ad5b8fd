"""The console script: signals, streams, and then the commands, whose import takes most of a start's time.

Little is imported here before `main` runs, so that Ctrl-C is quiet from the first moment on.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """The console script."""
    interrupted = signal.getsignal(signal.SIGINT)  # ignored, where a shell script runs us in the background
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)

    from edgeinfer.apps.terminal import open_streams

    open_streams()
    import gc

    # loading makes hundreds of thousands of small objects that stay: the collector is to look through them seldom, and not
    # once more at the end
    gc.set_threshold(100_000, 20, 20)
    from edgeinfer.apps.commands import cli

    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, interrupted)
    try:
        cli()
    finally:
        gc.freeze()


def _leave(signum: int, frame: FrameType | None) -> None:
    """While nothing is open yet: an exception would make a traceback of wherever the imports are."""
    os._exit(128 + signum)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)  # an exception, so that models are closed and files left whole
