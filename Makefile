# Two commands for a newcomer: `make demo` and `make test`. Each sets up everything it needs, once.

# The first of these that was tried with all of it.
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(firstword $(foreach python,python3 python3.13 python3.12 python3.11,$(shell $(python) -c '$(FITS)' 2>/dev/null && echo $(python))) python3)
VENV   := .venv
BIN    := $(VENV)/bin
# Headless rendering of the simulated arm: EGL over Mesa's software rasteriser.
DEBIAN_PACKAGES := libegl1 libgles2 libgl1-mesa-dri
# Servers that share a database, proxies in front of them, and the browser that opens the page. Tests that start these
# programs are skipped where they are not installed.
SERVERS := postgresql nginx-light caddy chromium
# Passed on to `robojax demo`, e.g. make demo ARGS="--episodes 0" to run until Ctrl-C.
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-peers docs notebooks faults lint licences types setup setup-dev peers lerobot rendering servers packages clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1 - \2/'

demo: setup rendering ## server, rooms and a simulated arm that picks up cubes
	@$(BIN)/robojax demo $(ARGS)

# Containers like to set it; then each of the processes that tests start, more than a hundred, compiles all files anew.
unexport PYTHONDONTWRITEBYTECODE
# Tests that depend on real time (mark `timed`) run after all others, and those that need all cores (`alone`) last.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
test: setup-dev rendering ## the whole test suite, or a part: make test ARGS=tests/unit/hooks
	@$(PYTEST) -m "not timed and not alone and not notebook" --numprocesses 3 $(ARGS); \
	status=$$?; $(PYTEST) -m "timed and not alone" --numprocesses 2 $(ARGS) || status=1; \
	$(PYTEST) -m alone $(ARGS) || status=1; exit $$status

# Without what Material for MkDocs prints at each start, about the end of its own life.
docs: setup-dev ## the guides as a site, with search: site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "robojax: $(BIN)/python -m http.server --directory site 8000, then http://127.0.0.1:8000 (a file has no search)"

notebooks: setup-dev rendering ## all notebooks, from top to bottom, with short training runs
	@$(PYTEST) -m notebook --numprocesses 2 $(ARGS)

# Before a release: make faults REPEAT=50, which takes an hour.
REPEAT ?= 1
faults: setup-dev ## break the server's links, policies and process, REPEAT times each
	@$(BIN)/python -m pytest --numprocesses 2 --timeout 300 tests/faults --repeat $(REPEAT) $(ARGS)

peers: $(VENV)/.robojax-peers $(VENV)/.robojax-gpu ## PyTorch, diffusers, Ray, openpi-client and JAX's CUDA compiler, for tests

test-peers: peers servers ## the tests that `make test` skips without these packages and programs
	@$(PYTEST) -m "needs_peers and not timed" --numprocesses 2 $(ARGS); \
	status=$$?; $(PYTEST) -m "needs_peers and timed" $(ARGS) || status=1; exit $$status

lint: setup-dev ## ruff: style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# An allowed word is not enough where another licence is added to it.
LICENCES := MIT;Apache;BSD;PSF;Python Software Foundation;ISC;MPL;Mozilla;Unlicense;Zlib;CC0;Public Domain
REFUSED := GPL;Affero;Proprietary;UNKNOWN
licences: setup-dev ## whether all that is installed may be used by everybody (docs/reference/dependencies.md)
	@$(BIN)/pip-licenses --from=mixed --partial-match --allow-only='$(LICENCES)' >/dev/null
	@$(BIN)/pip-licenses --from=mixed --partial-match --fail-on='$(REFUSED)' >/dev/null

types: setup-dev ## pyright
	@$(BIN)/pyright

setup: $(VENV)/.robojax-demo ## environment and packages for the demo
setup-dev: $(VENV)/.robojax-dev ## the same with the tools of developers

$(BIN)/python:
	@$(PYTHON) -c '$(FITS)' || { echo "robojax: the demo and the tests need Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1). Install one of them, or name it: make demo PYTHON=/path/to/python3.12"; exit 1; }
	@echo "robojax: making the environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "robojax: python's venv module failed; on Debian: apt-get install python3-venv"; exit 1; }

# pip compiles one file after the other; this uses all cores. Some packages ship files that do not compile.
COMPILE = $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib >/dev/null || true

$(VENV)/.robojax-demo: $(BIN)/python pyproject.toml
	@echo "robojax: installing packages (about a minute the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[sim]'
	@$(COMPILE)
	@touch $@

$(VENV)/.robojax-dev: $(BIN)/python pyproject.toml
	@echo "robojax: installing packages and developers' tools (about a minute the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[sim,dev]'
	@$(COMPILE)
	@touch $(VENV)/.robojax-demo $@

# One version of PyTorch: goldens were made with it, and any build of it will do. openpi-client needs an older NumPy than
# robojax does, so it gets an environment of its own.
$(VENV)/.robojax-peers: $(VENV)/.robojax-dev
	@echo "robojax: installing PyTorch, diffusers, Ray and openpi-client"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0' --editable '.[sim,dev,parity,ray]'
	@$(BIN)/python -m venv $(VENV)/openpi
	@$(VENV)/openpi/bin/python -m pip install --quiet --disable-pip-version-check 'openpi-client==0.1.2' typing_extensions
	@touch $@

# JAX looks for a GPU wherever its CUDA plugin is installed, so the plugin gets an environment of its own, which also
# finds the packages of .venv. It takes 850 MB.
PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))
PLUGINS := import jax; print(*(f"jax-cuda13-{name}=={jax.__version__}" for name in ("plugin", "pjrt")))
$(VENV)/.robojax-gpu: $(VENV)/.robojax-dev
	@echo "robojax: installing JAX's CUDA compiler, which needs no GPU"
	@$(BIN)/python -m venv $(VENV)/gpu
	@$(BIN)/python -c '$(PACKAGES)' > "$$($(VENV)/gpu/bin/python -c '$(PACKAGES)')/robojax.pth"
	@$(VENV)/gpu/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  $$($(BIN)/python -c '$(PLUGINS)') 'nvidia-cuda-nvcc<14' 'nvidia-nvvm<14' 'nvidia-nvjitlink<14'
	@touch $@

# LeRobot 0.6 needs Python 3.12, in an environment of its own with PyTorch of another version.
LEROBOT_PYTHON ?= $(firstword $(foreach python,python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python),$(shell $(python) -c '' 2>/dev/null && echo $(python))))
lerobot: $(VENV)/.robojax-lerobot ## LeRobot 0.6.1, for tests with its robot client, robots and policies
$(VENV)/.robojax-lerobot: $(BIN)/python
	@test -n '$(LEROBOT_PYTHON)' || { echo "robojax: LeRobot needs Python 3.12. Install it, or name it: make lerobot LEROBOT_PYTHON=/path/to/python3.12"; exit 1; }
	@echo "robojax: installing LeRobot (some minutes)"
	@$(LEROBOT_PYTHON) -m venv $(VENV)/lerobot
	@$(VENV)/lerobot/bin/python -m pip install --quiet --disable-pip-version-check 'lerobot[async,dataset]==0.6.1' \
	  httpx2 websockets msgpack typer  # robojax.client and the command, which tests start from this folder
	@touch $@

# Rendering works already (a GPU driver, or Mesa is there): nothing to do. Otherwise install when we may.
rendering: setup
	@MUJOCO_GL=egl $(BIN)/python -c 'import mujoco; mujoco.GLContext(8, 8)' >/dev/null 2>&1 || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "robojax: installing $(DEBIAN_PACKAGES) for headless rendering"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(DEBIAN_PACKAGES) >/dev/null; \
	  else \
	    echo "robojax: no headless OpenGL here. On Debian or Ubuntu: sudo apt-get install $(DEBIAN_PACKAGES)"; \
	  fi; }

# Nothing to do when all of them are installed. Tests start a PostgreSQL of their own.
servers: ## PostgreSQL, nginx, Caddy and Chromium, without which their tests are skipped
	@{ ls /usr/lib/postgresql/*/bin/initdb && command -v nginx && command -v caddy && command -v chromium; } >/dev/null 2>&1 || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "robojax: installing $(SERVERS) for tests"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SERVERS) >/dev/null; \
	  else \
	    echo "robojax: no PostgreSQL, nginx, Caddy or Chromium here. On Debian or Ubuntu: sudo apt-get install $(SERVERS)"; \
	  fi; }

packages: ## a wheel and an sdist, installed in fresh environments, and the demo from the wheel alone
	@.ci/packages

clean: ## remove the environment and caches of this checkout
	@rm -rf $(VENV) site .pytest_cache .ruff_cache
