"""One measurement: its time, what the origin sent, and how busy the machine was."""

import pathlib
import time

# Above this share of the machine's processors, a run says more about them than about the network.
CPU_MAX = 0.6


def processor_time():
    """The machine's time so far: all of it, what was busy, and what of that were user processes of low priority."""
    fields = [int(field) for field in pathlib.Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    user, nice, system, idle, waiting, *interrupts = fields
    return sum(fields), user + nice + system + sum(interrupts), nice


class Measured:
    """Begins when it is made."""

    def __init__(self, origin):
        self.origin = origin
        self.sent_before = origin.traffic()[0]
        self.processors_before = processor_time()
        self.began = time.monotonic()

    def end(self, times, **more):
        """The result, of which `times` are when each member had everything."""
        everything, busy, nice = (
            after - before for after, before in zip(processor_time(), self.processors_before, strict=True)
        )
        cpu = busy / max(everything, 1)
        return {
            "seconds": max(times) - self.began,
            "each": [round(each - self.began, 3) for each in times],
            "sent_by_origin": self.origin.traffic()[0] - self.sent_before,
            "cpu": round(cpu, 3),
            "cpu_of_low_priority": round(nice / max(everything, 1), 3),
            "is_valid": cpu <= CPU_MAX,
            **more,
        }
