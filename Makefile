# Two commands matter on a fresh machine: `make demo` and `make test`. Both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint browser screens docs site bench load schema accuracy sweep verify parity slow faults slurm-test clean

setup: $(VENV)/.core  ## the tool itself, without torch

$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,web,mcp]"
	$(BIN)/python -m compileall -q src  # an editable install has no bytecode yet; answers are faster with it
	touch $@

# What the engine needs. torch is asked for by its exact version so that a CPU build is taken where there is one.
$(VENV)/.engine: $(VENV)/.core
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt transformers safetensors tensorboard datasets peft pillow
	touch $@

# Diffusion models, and what the tests compare with: torchao's numbers in 8 bits.
$(VENV)/.peers: $(VENV)/.engine
	$(BIN)/python -m pip install --quiet --constraint constraints.txt diffusers torchao
	touch $@

demo: $(VENV)/.engine  ## the main job: recommendations for this machine and an example cluster, then a tiny training run
	$(BIN)/python benchmarks/demo.py

lint: $(VENV)/.peers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Debian's chromium for the tests of the pages; without it, and without the right to install it, they are skipped.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  (apt-get install -y -qq chromium || (apt-get update -qq && apt-get install -y -qq chromium)) >/dev/null 2>&1; } || \
	  echo "no chromium here: the tests in a browser will be skipped"

test: lint browser
	$(BIN)/python -m pytest -n 2

screens: $(VENV)/.engine browser  ## pictures of the pages, docs/screens (a minute)
	$(BIN)/python docs/screens.py

sweep: $(VENV)/.peers  ## trains a tiny model of every recipe on 2 processes; writes the table (half an hour)
	$(BIN)/python benchmarks/tiny_sweep.py --nproc 2

verify: $(VENV)/.peers  ## update the verification reports of all recipes; resumes where it stopped (hours)
	$(BIN)/python -m benchmarks.verify; status=$$?; $(BIN)/python docs/make.py verification.md && exit $$status

parity: $(VENV)/.engine  ## every layout against one process, and the page of what is supported (about an hour)
	$(BIN)/python -m pytest -m "slow or not slow" tests/engine/test_parity.py -n 2 --junitxml=build/parity.xml; \
	  status=$$?; $(BIN)/python docs/parity.py build/parity.xml && $(BIN)/python docs/make.py && exit $$status

slow: $(VENV)/.peers  ## the tests too slow for every run, but for those of parity (half an hour)
	$(BIN)/python -m pytest -m slow --ignore tests/engine/test_parity.py -n 2

faults: $(VENV)/.engine  ## kills, signals and damaged checkpoints; writes the table (ten minutes)
	$(BIN)/python benchmarks/faults.py

slurm-test: $(VENV)/.engine  ## jobs in a real SLURM, two hosts in network namespaces (as root; up to ten minutes)
	$(BIN)/python -m pytest -m slurm tests/slurm -vv -rs

docs: setup  ## writes the generated pages under docs/
	$(BIN)/python docs/make.py

site: $(VENV)/.docs  ## builds the documentation site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

$(VENV)/.docs: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

bench: setup  ## CPU time of the adviser and of the search, one table each
	$(BIN)/python benchmarks/adviser_speed.py
	$(BIN)/python benchmarks/search_speed.py

load: setup  ## 50 askers at once at the page's API, one table (two minutes)
	$(BIN)/python -m benchmarks.web_load

schema: setup  ## whatever may be asked of the page's API, many times over: no fault, answers as documented (minutes)
	SCHEMA_EXAMPLES=150 $(BIN)/python -m pytest tests/web/test_schema.py

accuracy: setup  ## the cost model against published measurements; refits without each source in turn (minutes)
	$(BIN)/python benchmarks/accuracy_report.py --left-out

clean:
	rm -rf $(VENV) dist build
