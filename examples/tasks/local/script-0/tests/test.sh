#!/bin/bash
# Write the reward to /logs/verifier/reward.txt: 1, 0.5 (partly solved) or 0. Depends on the files in /app alone.
/usr/bin/mkdir -p /logs/verifier
/usr/bin/rm -rf /logs/verifier/reward.txt /logs/verifier/reward.json
echo 0 > /logs/verifier/reward.txt
reward=$(/usr/bin/timeout -s KILL 15 /usr/bin/env -i /usr/bin/python3 -I -S - <<'EOF'
import os
import resource
import select
import subprocess
import time


def set_limits():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (128 << 20, 128 << 20))


def run(*command):
    """Return what a program prints within 3 seconds. It cannot write files."""
    process = subprocess.Popen(
        command,
        cwd="/app",
        env={"PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=set_limits,
    )
    pipe, output, end = process.stdout.fileno(), b"", time.monotonic() + 3
    while len(output) < 1000 and select.select([pipe], [], [], max(0, end - time.monotonic()))[0]:
        if not (part := os.read(pipe, 1000)):
            break
        output += part
    os.killpg(process.pid, 9)
    return output.decode(errors="replace").strip()

def read(name):
    path = "/app/" + name
    if os.path.realpath(path) != path or not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(100000)


def lines(name):
    return [line.strip() for line in (read(name) or "").strip().splitlines()]


kept = {}
solved = run('/usr/bin/bash', '/app/fog.sh') == 'boat'
partly = 'boat' in (read('fog.sh') or '')
unchanged = all(read(name) == text for name, text in kept.items())
print(0 if not unchanged else 1 if solved else 0.5 if partly else 0)
EOF
)
case $reward in 1 | 0.5) ;; *) reward=0 ;; esac
/usr/bin/rm -rf /logs/verifier/reward.txt /logs/verifier/reward.json
echo "$reward" > /logs/verifier/reward.txt
