#!/usr/bin/python3
"""`systemctl`, `systemd-run`, `poweroff`, `reboot`, `halt`, `shutdown` of a simulated host: see fakecloud_units.py."""

import json
import shlex
import socket
import sys
from pathlib import Path

UNITS, TRANSIENT = Path("/etc/systemd/system"), Path("/run/systemd/transient")
ENDS = {"poweroff": "poweroff", "halt": "poweroff", "reboot": "reboot"}
USAGE = "the simulated host's systemctl knows: start stop restart try-restart enable disable is-active is-enabled "
USAGE += "is-failed status show cat kill list-timers daemon-reload reset-failed set-property mask poweroff halt reboot"


def main(program, arguments):
    options = [a for a in arguments if a.startswith("-")]
    words = [a for a in arguments if not a.startswith("-")]
    if program == "systemd-run":
        return run_later(arguments)
    if program == "shutdown":
        return shutdown(options, words)
    if program in ENDS:
        return end(ENDS[program], force=bool({"-f", "--force", "-ff"} & set(options)))
    if "--user" in options:
        return say("Failed to connect to user scope bus: the simulated host has no user manager", 1)
    if not words:
        return say(USAGE, 1)
    verb, names = words[0], [n if "." in n else n + ".service" for n in words[1:]]
    names = ["ssh.service" if n == "sshd.service" else n for n in names]
    if verb in ENDS:
        return end(ENDS[verb], force=bool({"-f", "--force", "-ff"} & set(options)))
    if verb in ("daemon-reload", "reset-failed", "set-property"):  # unit files are read when they are used
        return 0
    if verb == "list-timers":
        return say(ask("timers")[1], 0)
    if verb not in VERBS or not names:
        return say(USAGE, 1)
    codes = [VERBS[verb](name, options) for name in names]
    return max(codes) if verb != "is-active" else min(codes)


def ask(*words):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("/run/init.sock")
    connection.sendall(json.dumps(words).encode() + b"\n")
    answer = json.loads(connection.makefile().read())
    return answer["code"], answer["text"]


def say(text, code):
    if text:
        print(text, file=sys.stderr if code else sys.stdout)
    return code


def end(verb, delay="", force=False):
    return say(*reversed(ask(verb, delay, "force" if force else "")))


def run_later(arguments):
    """systemd-run --unit=NAME --on-active=SPAN COMMAND..."""
    name, span, command = arguments[0], arguments[1], arguments[2:]
    if not (name.startswith("--unit=") and span.startswith("--on-active=") and command):
        return say("the simulated host's systemd-run knows: --unit=NAME --on-active=SPAN COMMAND...", 1)
    name, span = name.partition("=")[2], span.partition("=")[2]
    try:
        TRANSIENT.mkdir(parents=True, exist_ok=True)
        (TRANSIENT / f"{name}.service").write_text(f"[Service]\nExecStart={shlex.join(command)}\n")
        (TRANSIENT / f"{name}.timer").write_text(f"[Timer]\nOnActiveSec={span}\n")
    except PermissionError:
        return say("Interactive authentication required.", 1)
    return say(*reversed(ask("start", f"{name}.timer")))


def shutdown(options, words):
    """shutdown [-h|-P|-r|-c] [now | +MINUTES]"""
    if "-c" in options:
        return say(*reversed(ask("cancel")))
    when = words[0] if words else "+1"
    if when not in ("now", "0") and not when.lstrip("+").isdigit():
        return say(f"shutdown at {when!r}: the simulated host knows now and +MINUTES", 1)
    delay = "" if when in ("now", "0") else str(60 * int(when.lstrip("+")))
    return end("reboot" if "-r" in options else "poweroff", delay)


def change(verb):
    return lambda name, options: say(*reversed(ask(verb, name)))


def restart(name, options):
    ask("stop", name)
    # The old main process has to go first.
    import time

    for _ in range(900):
        if ask("pid", name)[1] == "0":
            break
        time.sleep(0.1)
    return say(*reversed(ask("start", name)))


def targets(name):
    """The targets of WantedBy=."""
    lines = (UNITS / name).read_text().splitlines()
    return [t for line in lines if line.startswith("WantedBy=") for t in line.partition("=")[2].split()]


def enable(name, options):
    if not (UNITS / name).exists():
        return say(f"Failed to enable unit: Unit file {name} does not exist.", 1)
    for target in targets(name):
        wants = UNITS / f"{target}.wants"
        try:
            wants.mkdir(exist_ok=True)
            (wants / name).unlink(missing_ok=True)
            (wants / name).symlink_to(UNITS / name)
        except PermissionError:
            return say("Interactive authentication required.", 1)
    return VERBS["start"](name, options) if "--now" in options else 0


def disable(name, options):
    try:
        for link in UNITS.glob(f"*.wants/{name}"):
            link.unlink()
    except PermissionError:
        return say("Interactive authentication required.", 1)
    return VERBS["stop"](name, options) if "--now" in options else 0


def is_enabled(name, options):
    enabled = any(UNITS.glob(f"*.wants/{name}"))
    if not {"-q", "--quiet"} & set(options):
        print("enabled" if enabled else "disabled" if (UNITS / name).exists() else "not-found")
    return 0 if enabled else 1


def is_state(wanted, otherwise):
    def verb(name, options):
        state = ask("state", name)[1]
        if not {"-q", "--quiet"} & set(options):
            print(state)
        return 0 if state == wanted else otherwise

    return verb


def status(name, options):
    state = ask("state", name)[1]
    print(f"{name}\n   Active: {state}\n Main PID: {ask('pid', name)[1]}")
    log = Path("/var/log/units") / name
    if log.exists():
        print(log.read_text(errors="replace")[-2000:])
    return 0 if state == "active" else 3


def show(name, options):
    values = {"Id": name, "ActiveState": ask("state", name)[1], "MainPID": ask("pid", name)[1]}
    values["LoadState"] = "loaded" if (UNITS / name).exists() else "not-found"
    wanted = [o.partition("=")[2] for o in options if o.startswith(("--property=", "-p="))]
    for key in wanted[0].split(",") if wanted else values:
        print(values[key] if "--value" in options else f"{key}={values[key]}")
    return 0


def cat(name, options):
    return say((UNITS / name).read_text(), 0) if (UNITS / name).exists() else say(f"No files found for {name}.", 1)


def kill(name, options):
    import signal

    given = [o.partition("=")[2] for o in options if o.startswith(("--signal=", "-s="))]
    number = signal.SIGTERM if not given else signal.Signals["SIG" + given[0].removeprefix("SIG")]
    return say(*reversed(ask("kill", name, str(int(number)))))


VERBS = {
    "start": change("start"),
    "stop": change("stop"),
    "restart": restart,
    "try-restart": restart,
    "enable": enable,
    "disable": disable,
    "mask": disable,
    "is-enabled": is_enabled,
    "is-active": is_state("active", 3),
    "is-failed": is_state("failed", 1),
    "status": status,
    "show": show,
    "cat": cat,
    "kill": kill,
}

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[0]).name, sys.argv[1:]))
