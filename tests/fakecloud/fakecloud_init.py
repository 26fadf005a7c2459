"""Process 1 of a simulated host: sets up its file system like cloud-init, then runs its services (fakecloud_units.py).

Started by fakecloud_hosts.py in namespaces of its own (network, mount, pid, uts, ipc, time) with the path of a JSON
file as its argument; a line on stdin says that the network is there. Standard library only.

The host sees /usr and /etc of the machine under overlays, the image's home, and nothing else. What it writes stays in
its disk folder, so it survives a reboot.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from fakecloud_units import UNITS, Init

# See fakecloud_clock.c.
CLOCK_LIBRARY, CLOCK_STEPS = "/usr/lib/fakecloud-clock.so", "/var/lib/fakecloud-clock"
CLOCK_STEP, CLOCK_STEP_COUNT = struct.Struct("qq"), 64  # since, offset

CLOUD_FINAL = """[Service]
Type=oneshot
RemainAfterExit=yes
KillMode=process
ExecStart=/bin/sh /var/lib/cloud/runcmd
"""


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    first_boot = not (Path(config["disk"]) / "root").exists()
    build_root(config)
    if sys.stdin.readline() != "network\n":
        raise SystemExit("the cloud went away")
    if first_boot:
        cloud_init(config)
    subprocess.run(["hostname", config["hostname"]], check=True)
    if steps := clock_steps(Path(CLOCK_STEPS)):
        subprocess.run(shift_boot_time(steps[-1][1]), check=True)
    Init(config["environment"]).run()


def clock_steps(table: Path) -> list[tuple[int, int]]:
    """The steps that a host's clock has made: (real unix time, offset from then on), in ns."""
    if not table.exists():
        return []
    steps = CLOCK_STEP.iter_unpack(table.read_bytes())
    return [(since, offset) for since, offset in steps if since]


def shift_boot_time(offset_ns: int) -> list[str]:
    """The command that, on the host, moves the boot time in /proc/stat as a step of the clock does."""
    script = f"""
        while umount /proc/stat 2> /dev/null; do :; done
        boot=$(sed -n 's/^btime //p' /proc/stat)
        sed "s/^btime .*/btime $((boot + {round(offset_ns / 1e9)}))/" /proc/stat > /run/stat
        mount --bind /run/stat /proc/stat"""
    return ["sh", "-ec", script]


def mount(kind: str, source: str, target: Path, options: str = "") -> None:
    command = ["mount", "-t", kind, *(["-o", options] if options else []), source, str(target)]
    subprocess.run(command, check=True)


def build_root(config: dict[str, Any]) -> None:
    """Makes the host's root from its disk folder and enters it."""
    disk = Path(config["disk"])
    root, first_boot = disk / "root", not (disk / "root").exists()
    for name in ("root/proc", "root/sys", "root/dev", "root/old", "root/run/sshd", "root/run/lock", "root/tmp",
                 "root/var/tmp", "root/var/log/units", "root/var/lib/sudo", "root/var/cache", "root/root",
                 "root/mnt", "root/opt", "root/srv", "root/home/ubuntu"):  # fmt: skip
        (disk / name).mkdir(parents=True, exist_ok=True)
    for volatile in ("run", "tmp"):  # as after a real boot
        shutil.rmtree(root / volatile)
        (root / volatile).mkdir()
    (root / "run/sshd").mkdir()
    (root / "run/lock").mkdir()
    for shared in ("tmp", "var/tmp", "run/lock"):
        (root / shared).chmod(0o1777)
    (root / "root").chmod(0o700)
    subprocess.run(["mount", "--bind", str(root), str(root)], check=True)  # pivot_root wants a mount point
    if first_boot:
        (root / "var/run").symlink_to("/run")
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            if (link := Path("/") / name).is_symlink():
                (root / name).symlink_to(link.readlink())
            elif link.is_dir():
                raise SystemExit(f"/{name} is not a link into /usr: the simulated cloud needs a merged /usr")
    overlay(["/usr"], disk / "upper/usr", root / "usr")
    if config["clock"] and first_boot:
        shutil.copyfile(config["clock"], root / CLOCK_LIBRARY.lstrip("/"))
        (root / CLOCK_STEPS.lstrip("/")).write_bytes(bytes(CLOCK_STEP.size * CLOCK_STEP_COUNT))
    overlay(["/etc"], disk / "upper/etc", root / "etc")
    overlay(config["home_layers"], disk / "upper/home", root / "home/ubuntu")
    mount("proc", "proc", root / "proc")
    boot_id = root / "run/boot_id"
    boot_id.write_text(Path("/proc/sys/kernel/random/uuid").read_text())
    # A new boot id each boot; and the one file of /proc through which a host could end the machine it runs on.
    for source, name in ((boot_id, "proc/sys/kernel/random/boot_id"), ("/dev/null", "proc/sysrq-trigger")):
        if (target := root / name).exists():
            subprocess.run(["mount", "--bind", str(source), str(target)], check=True)
    mount("sysfs", "sysfs", root / "sys", "ro")
    device_nodes(root / "dev")
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "old"], check=True)
    os.chroot(".")
    os.chdir("/")
    subprocess.run(["umount", "--lazy", "/old"], check=True)


def overlay(lower: list[str], upper: Path, target: Path) -> None:
    work = upper.with_name(upper.name + ".work")
    for folder in (upper, work, target):
        folder.mkdir(parents=True, exist_ok=True)
    mount("overlay", "overlay", target, f"lowerdir={':'.join(lower)},upperdir={upper},workdir={work}")


def device_nodes(dev: Path) -> None:
    """A private /dev: its own /dev/shm, which Ray fills, and no disk of the machine."""
    mount("tmpfs", "dev", dev, "mode=755")
    nodes = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
    for name, (major, minor) in nodes.items():
        os.mknod(dev / name, 0o20666, os.makedev(major, minor))
        (dev / name).chmod(0o666)
    for name in ("pts", "shm"):
        (dev / name).mkdir()
    mount("devpts", "devpts", dev / "pts", "newinstance,ptmxmode=0666,mode=620")
    mount("tmpfs", "shm", dev / "shm", "mode=1777")
    (dev / "ptmx").symlink_to("pts/ptmx")
    (dev / "fd").symlink_to("/proc/self/fd")
    for n, name in enumerate(("stdin", "stdout", "stderr")):
        (dev / name).symlink_to(f"/proc/self/fd/{n}")


def cloud_init(config: dict[str, Any]) -> None:
    """The first boot's part: host name, login user with its key, sudo, host key, and what the cloud puts in place."""
    user, home, uid = config["user"], Path("/home/ubuntu"), config["uid"]
    files = {
        "/etc/hostname": config["hostname"] + "\n",
        "/etc/hosts": f"127.0.0.1 localhost {config['hostname']}\n",
        "/etc/resolv.conf": "",
        "/etc/environment": "".join(f"{k}={v}\n" for k, v in config["environment"].items()),
        "/etc/uv/uv.toml": "offline = true\n",
        "/etc/pip.conf": f"[global]\nno-index = true\nfind-links = {config['wheels']}\n",
        "/etc/sudoers.d/90-cloud-init": f'Defaults env_keep += "{" ".join(config["environment"])}"\n'
        f"{user} ALL=(ALL) NOPASSWD:ALL\n",
        "/etc/ssh/sshd_config": "HostKey /etc/ssh/host_key\nUsePAM yes\nPasswordAuthentication no\nMaxStartups 100\n"
        "Subsystem sftp /usr/lib/openssh/sftp-server\n",
        "/etc/ld.so.preload": f"{CLOCK_LIBRARY}\n" if config["clock"] else "",
    }
    for path, text in files.items():
        Path(path).unlink(missing_ok=True)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    Path("/etc/sudoers.d/90-cloud-init").chmod(0o440)
    for path, text in config["programs"].items():
        Path(path).unlink(missing_ok=True)
        Path(path).write_text(text)
        Path(path).chmod(0o755)
    for alias in ("poweroff", "reboot", "halt", "shutdown"):
        link = Path("/usr/sbin") / alias
        link.unlink(missing_ok=True)
        link.symlink_to("/usr/bin/systemctl")
    shutil.rmtree(UNITS, ignore_errors=True)  # the machine's own units are none of the host's
    UNITS.mkdir(parents=True)
    if config["first_boot"]:
        (UNITS / "multi-user.target.wants").mkdir()
        (UNITS / "cloud-final.service").write_text(CLOUD_FINAL)
        (UNITS / "multi-user.target.wants/cloud-final.service").symlink_to(UNITS / "cloud-final.service")
        once = "test -e /var/lib/cloud/ran && exit 0\ntouch /var/lib/cloud/ran\n"
        Path("/var/lib/cloud").mkdir()
        Path("/var/lib/cloud/runcmd").write_text(once + "".join(c + "\n" for c in config["first_boot"]))
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/etc/ssh/host_key"], check=True)
    if subprocess.run(["getent", "passwd", user], stdout=subprocess.DEVNULL, check=False).returncode:
        subprocess.run(["useradd", "--no-create-home", "--home-dir", str(home), user], check=True)
    subprocess.run(["usermod", "-p", "*", "-s", "/bin/bash", "-d", str(home), "-u", str(uid), user], check=True)
    ssh = home / ".ssh"
    ssh.mkdir(mode=0o700, exist_ok=True)
    (ssh / "authorized_keys").write_text("".join(key + "\n" for key in config["keys"]))
    (ssh / "authorized_keys").chmod(0o600)
    for path in (home, ssh, ssh / "authorized_keys"):
        os.chown(path, uid, uid)


if __name__ == "__main__":
    main()
