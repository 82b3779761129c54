# Everything runs in .venv, which is made on first use and made anew when what it is made from changes.
# Needs only make and Python >= 3.10:   make demo   |   make test   |   make lint   |   make docs   |   make bench   |   make clean
# With another Python:                  make test PYTHON=/path/to/python3.12
# With another torch, in an environment of its own beside .venv:
#                                       make test TORCH=2.14.1
# A part of the tests:                  make test PYTEST_ARGS="tests/scheduler -k credit"
# Random trainings against DDP:         make fuzz FUZZ_ARGS="--seed 7 --count 50"

# Lightning's own tests of ddp, with bytescheduler in its place (half an hour; in an environment of their own, because
# what they need changes what Lightning does by default):
#                                       make lightning-suite CHECKOUT=/path/to/pytorch-lightning
# Networks and optimizers of third parties (Python >= 3.11; a minute, and what they need beside .venv):
#                                       make real-models
# Both strategies on a real Ray, of two machines that are on this one (a minute, and what Ray needs beside .venv):
#                                       make ray

PYTHON ?= python3
TORCH ?=
# Three files of tests at a time for two cores, as ranks wait for one another for part of a training; in the order of the
# rooms, whose last have the shortest tests, so that the cores are done together. What is measured on a link has nothing
# beside it.
AT_A_TIME := -n 3 --dist loadfile --no-loadscope-reorder
ROOMS_OF_LINKS := tests/links
# What runs Lightning's own tests; .ci/run has its tests take turns.
ROOM_OF_SUITE := tests/lightning_suite
# These need packages that .venv does not have.
ROOM_OF_MODELS := tests/real_models
ROOM_OF_RAY := tests/ray_train
PYTEST_ARGS ?=
# Which slow tests are run: none, all, or a seventh (3/7) and one case of each test in the files named.
SLOW ?= none
BENCH_ARGS ?=
CHECKOUT ?=
SUITE_ARGS ?=
FUZZ_ARGS ?=

# Packages are compiled as they are imported first, and hundreds of processes import torch: seconds of each.
unexport PYTHONDONTWRITEBYTECODE

VENV := $(if $(TORCH),build/torch-$(TORCH),.venv)
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
SUITE := build/lightning-suite
MODELS := build/real-models
RAY := build/ray
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check --no-input
# -qq: warnings are left out, errors are not. Python compiles what it imports; pip would compile three times as much.
INSTALL := $(PIP) install -qq --no-compile -c $(CONSTRAINTS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-all test-gpu fuzz lint docs bench lightning-suite real-models ray clean

help:
	@echo "make demo    train over a slow link, with DDP and with this package, and show both"
	@echo "make test    run the tests"
	@echo "make test-all    run all that has to hold before a release: also Ray, real models, the oldest versions"
	@echo "make test-gpu   run what wants a GPU, and print one summary"
	@echo "make fuzz    compare 200 random trainings with DDP's, until one differs"
	@echo "make lint    check style, format, types, which way imports go, and that no room grew"
	@echo "make docs    build the documentation into build/docs (Python 3.11 or later)"
	@echo "make bench   measure DDP and this package side by side on shaped links (root; an hour); python -m benchmarks lists all"
	@echo "make clean   remove what the others made"
	@echo "make lightning-suite CHECKOUT=DIR   run Lightning's own tests of ddp with bytescheduler in its place"
	@echo "make ray           train with both strategies on a real Ray, of two machines that are on this one"
	@echo "make real-models   train networks of Hugging Face, diffusers and torchvision, and compare with DDP"

demo: $(VENV)/.demo
	$(RUN) -m examples.demo

test: $(VENV)/.dev
ifeq ($(strip $(PYTEST_ARGS)),)
	$(RUN) -m pytest --slow "$(SLOW)" $(AT_A_TIME) \
	  $(patsubst %,--ignore=%,$(ROOMS_OF_LINKS) $(ROOM_OF_SUITE) $(ROOM_OF_MODELS) $(ROOM_OF_RAY))
	$(RUN) -m pytest --slow "$(SLOW)" $(ROOMS_OF_LINKS)
else
	$(RUN) -m pytest $(PYTEST_ARGS)
endif

test-all:
	.ci/run all

test-gpu: $(VENV)/.dev
	$(RUN) -m tests.cuda

fuzz: $(VENV)/.dev
	$(RUN) -m tests.parity.fuzz $(FUZZ_ARGS)

lint: $(VENV)/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(RUN) -m tests.house

# Without the network: links into the documentation of Python, torch and Lightning need DOCS_INTERSPHINX=1.
docs: $(VENV)/.docs
	$(RUN) -m sphinx -W --keep-going -q -b html -d build/docs-doctrees docs build/docs
	@echo "The documentation is build/docs/index.html"

bench: $(VENV)/.demo
	$(RUN) -m benchmarks networks $(BENCH_ARGS)

lightning-suite: $(SUITE)/.ready
	$(SUITE)/bin/python -m tests.lightning_suite $(SUITE_ARGS) -- "$(CHECKOUT)"

# The packages stand before those of .venv on the path, none of which is among them.
real-models: $(MODELS)/.ready
	PYTHONPATH="$(CURDIR)/$(MODELS)" $(RUN) -m pytest $(ROOM_OF_MODELS)

# Beside other work, Ray takes minutes for what it takes seconds for alone.
ray: $(RAY)/.ready
	PYTHONPATH="$(CURDIR)/$(RAY)" $(RUN) -m pytest -o timeout=900 -o faulthandler_timeout=930 $(ROOM_OF_RAY)

clean:
	rm -rf $(VENV) build dist demo_output lightning_logs checkpoints
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -exec rm -rf {} + 2>/dev/null || true

# The bare environment. The build backend goes in here, so that building too is under the constraints.
$(VENV)/.base: pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "There is no '$(PYTHON)' here. Install Python 3.10 or later, or name one: make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "'$(PYTHON)' is $$("$(PYTHON)" --version 2>&1 | head -n 1), but Python 3.10 or later is needed." \
	    "Name one: make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)." >&2; \
	  exit 1; }
	@echo "Making $(VENV) with $$("$(PYTHON)" --version)"
	@rm -rf $(VENV)
	@"$(PYTHON)" -m venv $(VENV)
	$(if $(TORCH),@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt >$(CONSTRAINTS))
	@$(INSTALL) hatchling
	@touch $@

# The version is part of the installed metadata, so a new one is a reason to install again.
$(VENV)/.demo: $(VENV)/.base src/lightning_bytescheduler/registration.py
	@echo "Installing the project and what the demo needs (minutes on a slow connection)"
	@$(INSTALL) --no-build-isolation -e ".[demo]"
	@touch $@

# All that the demo needs is in here too.
$(VENV)/.dev: $(VENV)/.base src/lightning_bytescheduler/registration.py
	@echo "Installing the project and what its tests need (minutes on a slow connection)"
	@$(INSTALL) --no-build-isolation -e ".[dev]"
	@touch $(VENV)/.demo $@

$(VENV)/.docs: $(VENV)/.base src/lightning_bytescheduler/registration.py
	@echo "Installing the project and what its documentation needs (a minute on a slow connection)"
	@$(INSTALL) --no-build-isolation -e ".[docs]"
	@touch $@

$(SUITE)/.ready: $(VENV)/.base tests/lightning_suite/requirements.txt src/lightning_bytescheduler/registration.py
	@echo "Installing the project and what Lightning's tests need (minutes on a slow connection)"
	@rm -rf $(SUITE)
	@$(RUN) -m venv $(SUITE)
	@$(SUITE)/bin/python -m pip --disable-pip-version-check --no-input install -qq -c constraints.txt hatchling
	@$(SUITE)/bin/python -m pip --disable-pip-version-check --no-input install -qq -c constraints.txt \
	  --no-build-isolation -e ".[dev]" -r tests/lightning_suite/requirements.txt
	@touch $@

# A folder beside .venv's packages, not an environment: torch is the same, and is not installed again.
$(MODELS)/.ready: $(VENV)/.dev tests/real_models/requirements.txt
	@echo "Installing what the networks and optimizers of third parties need (a minute on a slow connection)"
	@rm -rf $(MODELS)
	@$(PIP) install -qq --no-deps --no-compile --target $(MODELS) -r tests/real_models/requirements.txt
	@touch $@

# As above.
$(RAY)/.ready: $(VENV)/.dev tests/ray_train/requirements.txt
	@echo "Installing what Ray Train needs (a minute on a slow connection)"
	@rm -rf $(RAY)
	@$(PIP) install -qq --no-deps --no-compile --target $(RAY) -r tests/ray_train/requirements.txt
	@touch $@
