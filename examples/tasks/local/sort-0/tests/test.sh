#!/bin/bash
# Write the reward to /logs/verifier/reward.txt: 1, 0.5 (partly solved) or 0. Depends on the files in /app alone.
/usr/bin/mkdir -p /logs/verifier
/usr/bin/rm -rf /logs/verifier/reward.txt /logs/verifier/reward.json
echo 0 > /logs/verifier/reward.txt
reward=$(/usr/bin/timeout -s KILL 15 /usr/bin/env -i /usr/bin/python3 -I -S - <<'EOF'
import os


def read(name):
    path = "/app/" + name
    if os.path.realpath(path) != path or not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(100000)


def lines(name):
    return [line.strip() for line in (read(name) or "").strip().splitlines()]


kept = {
    'green.txt': 'lion\ntiger\nbird\nrain\ndeer\nstone\n',
}
solved = lines('sand.txt') == ['bird', 'deer', 'lion', 'rain', 'stone', 'tiger']
partly = sorted(lines('sand.txt')) == ['bird', 'deer', 'lion', 'rain', 'stone', 'tiger']
unchanged = all(read(name) == text for name, text in kept.items())
print(0 if not unchanged else 1 if solved else 0.5 if partly else 0)
EOF
)
case $reward in 1 | 0.5) ;; *) reward=0 ;; esac
/usr/bin/rm -rf /logs/verifier/reward.txt /logs/verifier/reward.json
echo "$reward" > /logs/verifier/reward.txt
