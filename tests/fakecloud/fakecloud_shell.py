"""A developer's way into a simulated cloud.

python fakecloud_shell.py                     starts one and opens a shell on its laptop
fakecloud                                     (in that shell) lists the machines and what can be done to them
fakecloud preempt i-0123 30                   does it: a method of FakeCloud with its arguments
"""

from __future__ import annotations

import json
import subprocess
import sys

from fakecloud_environment import Unavailable
from fakecloud_session import FakeCloud, Instance

ACTIONS = ("instances", "console", "kill_host", "reboot", "preempt", "jump_clock", "ports", "grep_disk", "wait_gone",
           "capacity_error", "fail_terminate", "error_but_created", "api_delay", "expire_credentials", "clear_faults",
           "unplug_laptop", "plug_laptop", "kill_laptop")  # fmt: skip


def main(arguments: list[str]) -> None:
    if not arguments:
        with FakeCloud.start() as cloud:
            print(f"the laptop of simulated cloud {cloud.name}: try `sky`, `art-sky`, `fakecloud`; exit ends it all")
            env = cloud.laptop_env({"PS1": f"(fakecloud {cloud.name}) \\w$ "})
            subprocess.run(cloud.enter(["bash", "--norc"]), env=env, cwd=cloud.home, check=False)
        return
    cloud = FakeCloud.attach(arguments[0])
    if len(arguments) == 1:
        show(cloud.instances())
        print(f"actions: {', '.join(ACTIONS)}")
    elif arguments[1] not in ACTIONS:
        raise SystemExit(f"fakecloud: there is no {arguments[1]}; there are {', '.join(ACTIONS)}")
    else:
        show(getattr(cloud, arguments[1])(*map(value, arguments[2:])))


def value(text: str) -> object:
    """A number where it is one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def show(result: object) -> None:
    if isinstance(result, list) and any(isinstance(i, Instance) for i in result):
        for i in result:
            spot = "spot" if i.spot else ""
            print(f"{i.id}  {i.state:10}  {i.type:12}  {i.region}  {i.public_ip}  {i.cluster or ''}  {spot}")
    elif result is not None:
        print(result)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Unavailable as e:
        raise SystemExit(f"fakecloud: {e}") from None
