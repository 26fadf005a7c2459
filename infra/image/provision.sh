#!/usr/bin/env bash
# Makes the machine it runs on one that an art-sky launch finds ready: /opt/art-sky/venv with all that the server needs,
# /opt/art-sky/vllm with vLLM, in the very versions of the given wheel, and the weights of a base model if one is named.
#
#   bash provision.sh WHEEL [--without-vllm] [--model ID]
#
# To be run as the user that SkyPilot logs in as (`ubuntu` on AWS), who must have sudo and reach a package index. It is
# the installation that setup would do (art_sky/node/install.py), ahead of time; a second run goes on where one failed.
# Nothing secret stays: the key to a gated model is read from HF_TOKEN. Then make the image; `clean.sh` comes before.
set -euo pipefail

UV_VERSION=0.13.9  # where the machine has no Python that is new enough
wheel=$(realpath "${1:?the wheel of art-sky, then the options}")
shift

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# The user's own, so that a launch can bring an image that is out of date up to date.
as_root install -d -o "$(id -u)" -g "$(id -g)" /opt/art-sky

if ! python3 -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
        as_root apt-get update -qq
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv
    fi
    python3 -m venv /opt/art-sky/uv
    /opt/art-sky/uv/bin/python -m pip install --quiet "uv==$UV_VERSION"
    export PATH=/opt/art-sky/uv/bin:$PATH UV_PYTHON_INSTALL_DIR=/opt/art-sky/python
fi

PYTHONPATH=$wheel python3 -m art_sky.node.image "$wheel" "$@"
