"""A program in a terminal of its own, for tests."""

import os
import re
import signal
import subprocess
import sys
import termios
import time


class Terminal:
    """`python -m MODULE ARGUMENTS` with a terminal for all its streams."""

    def __init__(self, *argv: str):
        self._controller, self._terminal = os.openpty()
        self._before = termios.tcgetattr(self._terminal)
        self._process = subprocess.Popen(
            [sys.executable, "-m", *argv],
            stdin=self._terminal,
            stdout=self._terminal,
            stderr=self._terminal,
            env={**os.environ, "TERM": "xterm"},
            start_new_session=True,
        )
        self.shown = ""  # all of it
        self._read = 0  # what was waited for

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exception) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._controller)
        os.close(self._terminal)

    def wait_for(self, pattern: str, seconds: float = 120.0) -> None:
        """Waits until the program shows a pattern, behind what was waited for before."""
        end = time.monotonic() + seconds
        while not (found := re.compile(pattern).search(self.shown, self._read)):
            assert time.monotonic() < end and self._process.poll() is None, self.shown
            self._take()
        self._read = found.end()

    def _take(self) -> None:
        self.shown += os.read(self._controller, 65536).decode(errors="replace")

    def type(self, text: str) -> None:
        """Types."""
        os.write(self._controller, text.encode())

    def ctrl_c(self) -> None:
        """Interrupts the program."""
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Waits for the end: the exit code, once all is shown."""
        code = self._process.wait(120)
        mark = "\0end\0"
        os.write(self._terminal, mark.encode())  # so that reading does not block
        while mark not in self.shown:
            self._take()
        self.shown = self.shown.replace(mark, "")
        return code

    @property
    def is_clean(self) -> bool:
        """Whether modes and cursor are as they were."""
        hidden = self.shown.rfind("\x1b[?25l") > self.shown.rfind("\x1b[?25h")
        return not hidden and termios.tcgetattr(self._terminal) == self._before
