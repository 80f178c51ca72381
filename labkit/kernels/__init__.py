"""The few operations that are worth writing more than once: the plain way (the oracle) and faster ones."""
