"""Simulated machines: processes with their own network address, shared memory, host name and process ids.

They are built from Linux namespaces, so all communication between them goes over the network.

    10.77.0.254 (this process) -- bridge --+-- 10.77.0.1 node1
                                           +-- 10.77.0.2 node2 ...

All machines share the files, as on a cluster with a shared file system; `hidden` folders are empty on one machine.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

BRIDGE, NETWORK = "alphaapollo", "10.77.0"
ISOLATE = (
    *("setpriv", "--pdeathsig", "KILL"),  # ends with its parent process
    *("unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
# Ray's session folder and shared memory are private to a machine. The script then waits for the network interface.
BOOT = """
set -e
hostname {name}
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
mount -t tmpfs tmpfs /dev/shm
for path in {hidden}; do mount -t tmpfs tmpfs "$path"; done
ip link set lo up
for attempt in $(seq 100); do ip link show eth0 >/dev/null 2>&1 && break; sleep 0.1; done
ip address add {address}/24 dev eth0
ip link set eth0 up
ip route add default via {gateway}
echo up
sleep infinity &
wait # and, as the first process, reap orphans
"""


def usable() -> str:
    """Reason why machines cannot be simulated here, or an empty string."""
    missing = [tool for tool in ("setpriv", "unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (packages util-linux, iproute2)"
    probe = in_own_network([*ISOLATE, "bash", "-c", "mount -t tmpfs tmpfs /dev/shm && ip link add probe type bridge"])
    done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=30)
    return f"no permission to create namespaces ({done.stderr.strip()}). Run as root" if done.returncode else ""


def in_own_network(command: Sequence[str]) -> list[str]:
    """Wrap the command in a temporary network namespace in which machines can be created."""
    root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *root, "--net", "--mount", *command]


def lay_network() -> None:
    """Create the bridge between the machines and this process."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


class Machine:
    """Simulated machine; `with machine(...)` ends it and all its processes."""

    def __init__(self, number: int, log_folder: Path, hidden: Sequence[Path] = ()):
        self.name, self.address = f"node{number}", f"{NETWORK}.{number}"
        self.logs = log_folder
        boot = BOOT.format(
            name=self.name,
            address=self.address,
            gateway=f"{NETWORK}.254",
            hidden=shlex.join(map(str, hidden)),
        )
        log = (log_folder / f"{self.name}.boot.log").open("w+")
        self._process = subprocess.Popen([*ISOLATE, "bash", "-c", boot], stdout=log, stderr=log)
        own = f"/proc/{self._process.pid}/ns/net"
        wait_until(lambda: os.readlink(own) != os.readlink("/proc/self/ns/net"), 10, f"{self.name}: no network")
        cable = f"cable{number}"
        run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(self._process.pid))
        run("ip", "link", "set", cable, "master", BRIDGE, "up")
        wait_until(lambda: "up" in Path(log.name).read_text().split(), 20, f"{self.name} did not start: {log.name}")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._inside = children[0]

    def command(self, *words: str) -> list[str]:
        """Command line that runs `words` on this machine."""
        return ["nsenter", "--target", self._inside, "--mount", "--uts", "--net", "--pid", *words]

    def start(self, *words: str, log: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a background process with output to LOG.log."""
        with (self.logs / f"{self.name}.{log}.log").open("ab") as out:
            return subprocess.Popen(self.command(*words), stdout=out, stderr=out, env=os.environ | environment)

    def say(self, *words: str) -> str:
        """Output of a short command on this machine."""
        return subprocess.run(self.command(*words), capture_output=True, text=True, check=True, timeout=60).stdout

    def end(self) -> None:
        """Kill the machine, as in a power failure."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@contextmanager
def machines(count: int, log_folder: Path, hidden: Mapping[int, Sequence[Path]]) -> Iterator[list[Machine]]:
    """Start node1, node2, ... `hidden`: {number of a machine: folders that are empty on it}."""
    log_folder.mkdir(parents=True, exist_ok=True)
    started: list[Machine] = []
    try:
        for number in range(1, count + 1):
            started.append(Machine(number, log_folder, hidden.get(number, ())))
        yield started
    finally:
        for machine in started:
            machine.end()


def run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=30)


def wait_until(true: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Wait until `true` returns True. Raises RuntimeError(otherwise) after `seconds`."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise RuntimeError(otherwise)
        time.sleep(0.1)


if __name__ == "__main__":
    print(usable() or "usable", file=sys.stderr)
