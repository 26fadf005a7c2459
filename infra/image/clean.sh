#!/usr/bin/env bash
# Takes off this machine what no two machines may share and what no image may hold: its identity, its SSH keys, whoever
# may log in, keys to clouds and hubs, histories, logs and caches. The last thing before the image is made; after it the
# machine lets nobody in any more.
set -euo pipefail

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

if command -v cloud-init >/dev/null; then
    as_root cloud-init clean --logs --seed  # else the next machine would take itself for this one
fi
as_root truncate --size 0 /etc/machine-id
as_root rm -f /var/lib/dbus/machine-id /var/lib/systemd/random-seed /etc/ssh/ssh_host_*
for home in /root /home/*; do
    as_root rm -rf "$home"/.ssh "$home"/.aws "$home"/.config/gcloud "$home"/.docker "$home"/.netrc "$home"/.git-credentials \
        "$home"/.cache/pip "$home"/.cache/uv "$home"/.cache/huggingface/token "$home"/.cache/huggingface/stored_tokens \
        "$home"/.bash_history "$home"/.python_history "$home"/.lesshst "$home"/.wget-hsts
done
as_root rm -rf /tmp/art-sky-image
as_root find /var/log -type f -delete
as_root find /var/lib/apt/lists /var/cache/apt -type f -delete
sync
