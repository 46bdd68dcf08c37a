"""tensor-relay: an origin and its subscribers."""

import json
import os
import pathlib
import subprocess
import threading
import time

DEADLINE_S = 900


class Process:
    """A running program, of which each line of JSON on stdout is kept with the time of its arrival."""

    def __init__(self, command, folder, name):
        self.name, self.lines, self.arrived = name, [], threading.Condition()
        self.log = folder / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            now = time.monotonic()
            with self.arrived:
                self.lines.append((now, json.loads(line)))
                self.arrived.notify_all()
        with self.arrived:
            self.lines.append((time.monotonic(), {"event": "ended"}))
            self.arrived.notify_all()

    def wait_for(self, event, **fields):
        """When the event with these fields came, and its object."""
        wanted = {"event": event, **fields}.items()

        def found():
            return next((each for each in self.lines if wanted <= each[1].items() or each[1]["event"] == "ended"), None)

        with self.arrived:
            if not self.arrived.wait_for(found, DEADLINE_S) or found()[1]["event"] == "ended":
                raise SystemExit(f"{self.name}: no {dict(wanted)}\n{self.log.read_text()[-4000:]}")
            return found()

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Origin(Process):
    """Serves the file `model.safetensors` of the folder as the topic `model`."""

    def __init__(self, program, host, folder, name, options=()):
        command = [program, "serve", "--json", "--topic=model=model.safetensors", "--chunk-size=1MiB",
                   f"--listen={host.address}:4747", "--admin=none", f"--state-dir=state-{name}", *options]
        super().__init__(host.command(*command), folder, name)
        self.ticket = pathlib.Path(folder, self.wait_for("serving")[1]["ticket_file"])


class Member(Process):
    """Receives the topic into memory, and stays until it is stopped."""

    def __init__(self, program, host, folder, origin, options=()):
        name = f"{origin.name}-{host.name}"
        command = [program, "subscribe", origin.ticket, "--topic=model", "--json", *options]
        environment = ["env", f"HOME={folder / name}", f"XDG_STATE_HOME={folder / name}"]
        os.makedirs(folder / name, exist_ok=True)
        super().__init__(host.command(*environment, *command), folder, name)
        self.address = host.address
