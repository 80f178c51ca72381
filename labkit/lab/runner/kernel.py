"""The kernel of executed notebooks: ipykernel with numbered output.

A kernel publishes its output on a socket that may drop messages. If more than 1,000
wait, it drops them silently, and the run still succeeds. Here

- the queue has no limit, so a cell that prints 10,000 lines keeps all of them;
- every message has a serial number in its metadata, so the runner detects a gap
  (`labkit.lab.runner.client`).

The runner starts it as `python -m labkit.lab.runner.kernel -f CONNECTION_FILE`.
"""

from __future__ import annotations

import threading

import zmq
from ipykernel.kernelapp import IPKernelApp

SERIAL = "labkit_serial"  # the metadata key of the serial number


def number_messages(session, socket) -> None:
    """Make `session.send` number the messages that it sends through `socket`."""
    send, lock, sent = session.send, threading.Lock(), 0

    def numbered(stream, msg_or_type, *args, **kwargs):
        nonlocal sent
        # ipykernel passes either the publishing thread or a wrapper of it
        if stream is not socket and getattr(stream, "background_socket", None) is not socket:
            return send(stream, msg_or_type, *args, **kwargs)
        with lock:  # number and send in one step, because threads print too
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
