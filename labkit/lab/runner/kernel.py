"""The kernel that executed notebooks run in: ipykernel, plus a number on everything it publishes.

A notebook's output travels over a publish/subscribe socket, which is allowed to drop messages: past
1,000 waiting ones it does so silently, and the run still ends well. Two changes:

- the queue has no limit, so that a cell which prints 10,000 pieces keeps all of them;
- every message carries a running number in its metadata, so that the runner sees a gap if one is lost
  all the same (`labkit.lab.runner.client`).

Started as `python -m labkit.lab.runner.kernel -f CONNECTION_FILE` by the interpreter that runs the runner,
whatever kernel the notebook's metadata names.
"""

from __future__ import annotations

import threading

import zmq
from ipykernel.kernelapp import IPKernelApp

SERIAL = "labkit_serial"  # the metadata key of the running number


def number_messages(session, socket) -> None:
    """Make `session.send` add 1, 2, 3 … to the metadata of everything it sends through `socket`."""
    send, lock, sent = session.send, threading.Lock(), 0

    def numbered(stream, msg_or_type, *args, **kwargs):
        nonlocal sent
        # ipykernel hands in either the publishing thread or the socket-like face of it
        if stream is not socket and getattr(stream, "background_socket", None) is not socket:
            return send(stream, msg_or_type, *args, **kwargs)
        with lock:  # numbering and sending are one step, also for output from threads
            sent += 1
            if isinstance(msg_or_type, dict):
                msg_or_type.setdefault("metadata", {})[SERIAL] = sent
            else:
                kwargs["metadata"] = {**(kwargs.get("metadata") or {}), SERIAL: sent}
            return send(stream, msg_or_type, *args, **kwargs)

    session.send = numbered


class NumberingKernelApp(IPKernelApp):
    """ipykernel with an unlimited output queue and numbered output."""

    def init_iopub(self, context):
        limit = context.sockopts.get(zmq.SNDHWM)
        context.setsockopt(zmq.SNDHWM, 0)  # 0: no limit; the default of the sockets made next
        super().init_iopub(context)
        if limit is None:
            context.sockopts.pop(zmq.SNDHWM)
        number_messages(self.session, self.iopub_socket)


if __name__ == "__main__":
    NumberingKernelApp.launch_instance()
