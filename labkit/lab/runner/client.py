"""An nbclient that reports every failure of a notebook as an error.

| nbclient                                          | here                            |
|---------------------------------------------------|---------------------------------|
| runs the kernel named in the notebook's metadata  | runs this interpreter           |
| loses output if the kernel is faster              | has no queue limit; a gap is an error |
| has a time limit per cell                         | has one per notebook            |
| keeps output of any size                          | interrupts a cell at its limit  |
| drops output of a thread after its cell has ended | raises an error                 |
| prints a traceback after SIGTERM                  | stops the kernel and raises     |

`raise_on_iopub_timeout` detects a cell whose end never arrives. It does not detect a
lost line of output, so `labkit.lab.runner.kernel` numbers the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import sys
import time
from queue import Empty

import zmq
import zmq.asyncio
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbclient.util import run_sync

from labkit.lab.runner.kernel import SERIAL
from labkit.lab.runner.limits import Limits, NotebookFailure
from labkit.lab.runner.notebooks import code_cells

OUTPUT = ("stream", "display_data", "execute_result", "update_display_data", "error")
_log = logging.getLogger("labkit.lab.runner")
_log.addHandler(logging.NullHandler())  # failures are reported once, by the runner
_log.propagate = False


class ThisInterpreter(KernelSpecManager):
    """The kernel specs of one kernel, the running interpreter, under any name."""

    def get_kernel_spec(self, kernel_name):
        command = [sys.executable, "-m", "labkit.lab.runner.kernel", "-f", "{connection_file}"]
        return KernelSpec(argv=[*command, "--log-level=ERROR"], language="python")


class StrictClient(NotebookClient):
    """Execute one notebook in `ThisInterpreter`.

    Calls `on_cell(number, total)` before each code cell.
    """

    def __init__(self, notebook, folder: str, limits: Limits, on_cell):
        super().__init__(
            notebook,
            timeout_func=lambda cell: max(1, math.ceil(self.deadline - time.monotonic())),
            raise_on_iopub_timeout=True,
            iopub_timeout=60,  # seconds to read what a finished cell printed
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
            extra_arguments=["--HistoryManager.hist_file=:memory:"],
            log=_log,
        )
        self.limits, self.on_cell = limits, on_cell
        self.deadline = time.monotonic() + limits.seconds
        self.failure: str | None = None
        self.signal: int | None = None  # that ended the run
        self._received: set[int] = set()  # serial numbers
        self._spans: dict[int, list[int]] = {}  # cell -> first and last of its serial numbers
        self._ended: dict[str, int] = {}  # request -> its cell, once the kernel is idle
        self._printed = ""  # text of the running cell
        self._bytes = 0  # of the running cell's output

    async def async_execute(self, **options):
        """Run every cell.

        Raises NotebookFailure if a cell fails, exceeds a limit or loses output,
        InterruptedError after SIGTERM, and KeyboardInterrupt after SIGINT.
        """
        self._context = zmq.asyncio.Context()  # its I/O thread ends with the notebook
        self._context.setsockopt(zmq.RCVHWM, 0)  # no limit on what waits to be read
        self.reset_execution_trackers()
        try:
            async with self.async_setup_kernel(**options):
                for index, cell in enumerate(self.nb.cells):
                    await self._run(cell, index)
                await self._check_nothing_lost()
        except (asyncio.CancelledError, NotebookFailure):
            if self.signal is None:
                raise
            if self.km is not None:  # the kernel was still starting
                await self._async_cleanup_kernel()
            if self.signal == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise InterruptedError("The run was ended by SIGTERM.") from None
        except (RuntimeError, TimeoutError) as error:  # before the first cell
            raise NotebookFailure(f"its kernel did not start: {error}") from error
        finally:
            self._context.destroy(linger=0)

    execute = run_sync(async_execute)

    def create_kernel_manager(self):
        self.km = AsyncKernelManager(
            kernel_name="python3", context=self._context, kernel_spec_manager=ThisInterpreter()
        )
        return self.km

    async def async_start_new_kernel(self, **options):
        """Start the kernel; from now on SIGINT and SIGTERM cancel the run."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def cancel(number: int) -> None:
            self.signal, self.shutdown_kernel = number, "immediate"
            task.cancel()

        with contextlib.suppress(NotImplementedError, RuntimeError):  # Windows, or a thread
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, cancel, number)
        await super().async_start_new_kernel(**options)

    async def async_start_new_kernel_client(self, **options):
        """Connect to the kernel and watch its output channel from the beginning."""
        client = await super().async_start_new_kernel_client(**options)
        receive = client.iopub_channel.get_msg

        async def watched(*args, **kwargs):
            message = await receive(*args, **kwargs)
            self._received.add(message["metadata"].get(SERIAL, 0))
            cell = self._ended.get(message["parent_header"].get("msg_id"))
            if cell is not None and message["msg_type"] in OUTPUT:
                self.failure = f"{self._name(cell)} printed after its end; join its threads"
            return message

        client.iopub_channel.get_msg = watched
        return client

    async def _run(self, cell, index: int) -> None:
        code = code_cells(self.nb)
        if index in code:
            self.on_cell(code.index(index) + 1, len(code))
        self._printed, self._bytes = "", 0
        name = self._name(index)
        try:
            await self.async_execute_cell(cell, index)
        except CellExecutionError as error:
            self.failure = self.failure or f"{name} raised {error.ename}: {error.evalue}"
        except CellTimeoutError:
            late = time.monotonic() >= self.deadline
            limit = f"was still running after the limit of {self.limits.seconds:g} s"
            self.failure = f"{name} {limit if late else 'ended but its output never arrived'}"
            self.shutdown_kernel = "immediate"  # a busy kernel does not answer
        except DeadKernelError:
            self.failure = f"{name} lost its kernel: the process died (out of memory?)"
        if self.failure:
            raise NotebookFailure(self.failure)

    def process_message(self, msg, cell, cell_index):
        serial, kind, content = msg["metadata"].get(SERIAL, 0), msg["msg_type"], msg["content"]
        span = self._spans.setdefault(cell_index, [serial, serial])
        span[:] = min(span[0], serial), max(span[1], serial)
        if kind == "status" and content["execution_state"] == "idle":
            self._ended[msg["parent_header"]["msg_id"]] = cell_index
        if kind in OUTPUT and kind != "error":
            room = self.limits.lines - self._lines()
            excess = self._excess(content)
            if excess and self.failure is None:
                self.failure = f"{self._name(cell_index)} printed more than {excess}; print less"
                self._interrupt = asyncio.ensure_future(self.km.interrupt_kernel())
            if excess:
                if kind != "stream" or room <= 0:
                    return None
                lines = content["text"].splitlines(keepends=True)[:room]
                content["text"] = "".join(lines)[: self.limits.text_bytes]
        return super().process_message(msg, cell, cell_index)

    def _lines(self) -> int:
        return self._printed.count("\n") + self._printed.count("\r")  # progress bars print \r

    def _excess(self, content: dict) -> str | None:
        """Count an output of the running cell; return the limit that it exceeds, or None."""
        data = content.get("data", {})
        self._printed += content.get("text") or str(data.get("text/plain", ""))
        self._bytes += len(content.get("text", "")) + sum(len(str(part)) for part in data.values())
        limits = self.limits
        if self._lines() > limits.lines:
            return f"{limits.lines:,} lines"
        if len(self._printed.encode()) > limits.text_bytes:
            return f"{limits.text_bytes:,} bytes of text"
        return f"{limits.all_bytes:,} bytes of output" if self._bytes > limits.all_bytes else None

    async def _check_nothing_lost(self) -> None:
        spans = self._spans.values()
        first, last = min(low for low, _ in spans), max(high for _, high in spans)
        expected = set(range(first, last + 1))
        try:
            while not expected <= self._received:  # a thread's output may arrive late
                await self.kc.iopub_channel.get_msg(timeout=1)
        except Empty:
            lost = expected - self._received
            cells = [cell for cell, (_, high) in self._spans.items() if min(lost) <= high]
            text = f"{self._name(min(cells))} lost {len(lost)} of its messages; run it again"
            raise NotebookFailure(text) from None

    def _name(self, index: int) -> str:
        first_line = next(iter(self.nb.cells[index].source.strip().splitlines()), "")
        number = sum(code <= index for code in code_cells(self.nb))  # as in the author's file
        return f"cell {number} ({first_line[:60]!r})"
