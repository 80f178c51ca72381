"""papermill's client, made strict: what it would let pass ends the run with a sentence.

| papermill and nbclient                         | here                                              |
|------------------------------------------------|---------------------------------------------------|
| run the kernel that the notebook's metadata names | run this interpreter                           |
| lose output when the kernel outruns them       | no queue limit, and a gap in the numbers is a failure |
| have a time limit per cell                     | one for the notebook                              |
| keep output of any size                        | stop the cell that exceeds its limit              |
| drop what a thread prints after its cell ended | a failure                                         |
| leave an I/O thread behind for every notebook  | the messaging context ends with the notebook      |

Cost: one set entry per message. Built on the documented extension points of papermill and nbclient.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from queue import Empty

import zmq
import zmq.asyncio
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbclient.util import run_sync
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine

from labkit.runner.kernel import SERIAL
from labkit.runner.limits import Limits, NotebookFailure
from labkit.runner.notebooks import code_cells

OUTPUT = ("stream", "display_data", "execute_result", "update_display_data", "error")
_log = logging.getLogger("labkit.runner")
_log.addHandler(logging.NullHandler())  # failures are reported once, by the runner
_log.propagate = False


class ThisInterpreter(KernelSpecManager):
    """Knows one kernel, the interpreter that is running, whatever name is asked for."""

    def get_kernel_spec(self, kernel_name):
        argv = [sys.executable, "-m", "labkit.runner.kernel", "-f", "{connection_file}", "--log-level=ERROR"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


class StrictClient(PapermillNotebookClient):
    """Executes one notebook in `ThisInterpreter`, under `limits`; `on_cell(number, of_how_many)` is told of each."""

    def __init__(self, nb_man, *, limits: Limits, on_cell, **options):
        super().__init__(
            nb_man, timeout_func=self._seconds_left, kernel_name="python3", log=_log,
            iopub_timeout=60,  # seconds to read what a finished cell printed, on however busy a machine
            extra_arguments=["--HistoryManager.hist_file=:memory:"], **options,
        )  # fmt: skip
        self.limits, self.on_cell = limits, on_cell
        self.deadline = time.monotonic() + limits.seconds
        self.failure: str | None = None
        self._received: set[int] = set()  # running numbers
        self._spans: dict[int, tuple[int, int]] = {}  # cell -> first and last of its running numbers
        self._ended: dict[str, int] = {}  # request -> its cell, once that is idle
        self._size = (0, 0, 0)  # lines, bytes of text, bytes of the cell at work
        self._kept_lines = 0  # of them, before one exceeded the limit

    def execute(self, **start):
        """Run every cell; raise `NotebookFailure` if one cannot run, is too large, or lost something."""
        self._context = zmq.asyncio.Context()
        self._context.setsockopt(zmq.RCVHWM, 0)  # no limit on what waits to be read
        try:
            return super().execute(**start)
        except (RuntimeError, TimeoutError) as error:  # before the first cell
            raise NotebookFailure(f"its kernel did not start: {error}") from error
        finally:
            self._context.destroy(linger=0)

    def create_kernel_manager(self):
        self.km = AsyncKernelManager(
            kernel_name="python3", context=self._context, kernel_spec_manager=ThisInterpreter()
        )
        return self.km

    def start_new_kernel_client(self, **options):
        """Watch the output channel from the beginning."""
        client = super().start_new_kernel_client(**options)
        channel = client.iopub_channel
        receive = channel.get_msg

        async def watched(*args, **kwargs):
            message = await receive(*args, **kwargs)
            self._received.add(message["metadata"].get(SERIAL, 0))
            cell = self._ended.get(message["parent_header"].get("msg_id"))
            if cell is not None and message["msg_type"] in OUTPUT:
                self.failure = f"{self._name(cell)} went on printing after it had ended; wait for its threads"
            return message

        channel.get_msg = watched
        return client

    def papermill_execute_cells(self):
        """papermill's loop, with every way of failing named."""
        code = code_cells(self.nb)
        for index, cell in enumerate(self.nb.cells):
            if index in code:
                self.on_cell(code.index(index) + 1, len(code))
            self._size = (0, 0, 0)
            self.nb_man.cell_start(cell, index)
            try:
                self.execute_cell(cell, index)
            except CellExecutionError as error:
                self.nb_man.cell_exception(cell, cell_index=index, exception=error)
                self.failure = self.failure or f"{self._name(index)} raised {error.ename}: {error.evalue}"
            except CellTimeoutError:
                self.failure = f"{self._name(index)} was still running after the {self.limits.seconds:g} s it may take"
                if time.monotonic() < self.deadline:
                    self.failure = f"{self._name(index)} ended but its output never arrived whole"
                self.shutdown_kernel = "immediate"  # a busy kernel does not answer a polite request
            except DeadKernelError:
                self.failure = f"{self._name(index)} lost its kernel: the process died (out of memory?)"
            finally:
                self.nb_man.cell_complete(cell, cell_index=index)
            if self.failure:
                raise NotebookFailure(self.failure)
        self._check_nothing_lost()

    def process_message(self, msg, cell, cell_index):
        serial, kind = msg["metadata"].get(SERIAL, 0), msg["msg_type"]
        first, last = self._spans.get(cell_index, (serial, serial))
        self._spans[cell_index] = min(first, serial), max(last, serial)
        if kind == "status" and msg["content"]["execution_state"] == "idle":
            self._ended[msg["parent_header"]["msg_id"]] = cell_index
        if kind in OUTPUT and kind != "error" and self._exceeds(msg["content"], cell_index):
            room = self.limits.lines - self._kept_lines
            self._kept_lines = self.limits.lines
            if kind != "stream" or room <= 0:
                return None
            kept = msg["content"]["text"].splitlines(keepends=True)[:room]
            msg["content"]["text"] = "".join(kept)[: self.limits.text_bytes]
        return super().process_message(msg, cell, cell_index)

    def _exceeds(self, content, index: int) -> bool:
        text = content.get("text") or str(content.get("data", {}).get("text/plain", ""))
        lines, text_bytes, all_bytes = self._size
        self._size = (
            lines + text.count("\n") + text.count("\r"),  # a progress bar saves a line for every step
            text_bytes + len(text.encode()),
            all_bytes + len(text.encode()) + sum(len(str(part)) for part in content.get("data", {}).values()),
        )
        allowed = (self.limits.lines, self.limits.text_bytes, self.limits.all_bytes)
        units = ("lines", "bytes of text", "bytes of output")
        if self.failure is None:
            self._kept_lines = lines
        over = [f"{limit:,} {unit}" for size, limit, unit in zip(self._size, allowed, units) if size > limit]
        if over and self.failure is None:
            self.failure = f"{self._name(index)} printed more than the {over[0]} that one cell may"
            self._interrupting = asyncio.ensure_future(self.km.interrupt_kernel())  # it may print for ever
        return bool(over)

    def _check_nothing_lost(self) -> None:
        if not self._spans:
            return
        first, last = zip(*self._spans.values())
        expected = set(range(min(first), max(last) + 1))
        if expected - self._received:
            run_sync(self._drain)()  # a thread's number may arrive behind its cell's last one
        lost = expected - self._received
        if lost:
            cell = next((cell for cell, (low, high) in self._spans.items() if low <= min(lost) <= high), 0)
            raise NotebookFailure(f"{self._name(cell)} lost {len(lost)} of its messages: its output is incomplete")

    async def _drain(self) -> None:
        try:
            while True:
                await self.kc.iopub_channel.get_msg(timeout=1)
        except Empty:
            return

    def _name(self, index: int) -> str:
        first_line = next(iter(self.nb.cells[index].source.strip().splitlines()), "")
        number = sum(code <= index for code in code_cells(self.nb))  # counted as in the author's file
        return f"cell {number} ({first_line[:60]!r})"

    def _seconds_left(self, cell) -> int:
        return max(1, math.ceil(self.deadline - time.monotonic()))


class StrictEngine(NBClientEngine):
    """papermill's engine with `StrictClient` in it."""

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, *, limits, on_cell, environment, start_timeout=60, **_):
        client = StrictClient(nb_man, limits=limits, on_cell=on_cell, startup_timeout=start_timeout)
        client.execute(cwd=os.getcwd(), env=environment)  # papermill has gone to the notebook's folder

    @classmethod
    def nb_kernel_name(cls, nb, name=None):
        return "python3"

    @classmethod
    def nb_language(cls, nb, language=None):
        return "python"
