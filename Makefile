# On a fresh machine: `make demo` and `make test`. Both create .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where PYTHONDONTWRITEBYTECODE is set, every worker would compile the tests, and every command the source, again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.PHONY: megatron corpora setup demo test wheel test-times lint style browser screens docs site budget bench load schema accuracy sweep file-sweep verify parity slow faults mutation slurm-test clean

setup: $(VENV)/.core  ## the tool itself, without torch

$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,web,mcp]"
	$(BIN)/python -m compileall -q src  # an editable install has no bytecode yet; answers are faster with it
	touch $@

# Dependencies of the engine. torch is pinned exactly so that pip takes a CPU build where there is one.
$(VENV)/.engine: $(VENV)/.core
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt transformers safetensors tensorboard datasets peft pillow wandb mlflow-skinny
	touch $@

# Diffusion models, and torchao, which the fp8 tests compare with.
$(VENV)/.peers: $(VENV)/.engine
	$(BIN)/python -m pip install --quiet --constraint constraints.txt diffusers torchao
	touch $@

demo: $(VENV)/.engine  ## recommend plans for this machine and example clusters, then train a tiny model
	$(BIN)/python benchmarks/demo.py

lint: style
	$(BIN)/mypy

style: $(VENV)/.peers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Debian's chromium for the browser tests; where it is missing and cannot be installed, they are skipped.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  (apt-get install -y -qq chromium || (apt-get update -qq && apt-get install -y -qq chromium)) >/dev/null 2>&1; } || \
	  echo "chromium not found: browser tests will be skipped"

# mypy needs a minute of one core: it runs beside the tests, and its findings are printed after theirs.
test: style browser
	@mkdir -p build; $(BIN)/mypy >build/mypy.log 2>&1 & types=$$!; \
	  $(PYTEST) -n 2 --dist worksteal; status=$$?; \
	  wait $$types || status=1; cat build/mypy.log; exit $$status

wheel: setup  ## build the wheel, install it in a clean environment without torch, and type the first commands (two minutes)
	$(PYTEST) -m slow tests/first_hour/test_01_install.py -n 0

test-times: $(VENV)/.peers browser  ## the same tests; the slowest files and tests at the end
	$(PYTEST) -n 2 --dist worksteal -p tests.times

screens: $(VENV)/.engine browser  ## screenshots of the web UI, docs/screens (a minute)
	$(BIN)/python docs/screens.py

sweep: $(VENV)/.peers  ## train a tiny model of every recipe on 2 processes; write the table (half an hour)
	$(BIN)/python benchmarks/tiny_sweep.py --nproc 2

engine-types: $(VENV)/.engine  ## train a small model of every decoder type of transformers; write the table (20 minutes)
	$(BIN)/python -W ignore benchmarks/engine_types.py --save; status=$$?; $(BIN)/python docs/make.py models.md && exit $$status

file-sweep: $(VENV)/.peers  ## take users' own files through export, recommend and launch; print what is lost (10 minutes)
	$(BIN)/python -W ignore -m benchmarks.file_to_file

verify: $(VENV)/.peers  ## update the verification reports of all recipes; resumes where it stopped (hours)
	$(BIN)/python -m benchmarks.verify; status=$$?; $(BIN)/python docs/make.py verification.md && exit $$status

parity: $(VENV)/.engine  ## compare every layout with one process; write the support matrix (about an hour)
	$(BIN)/python -m pytest -m "slow or not slow" tests/engine/test_parity.py -n 2 --junitxml=build/parity.xml; \
	  status=$$?; $(BIN)/python docs/parity.py build/parity.xml && $(BIN)/python docs/make.py && exit $$status

slow: $(VENV)/.peers  ## slow tests other than parity (half an hour)
	$(BIN)/python -m pytest -m slow --ignore tests/engine/test_parity.py -n 2

mutation: $(VENV)/.peers  ## change 200 operators at random and count the changes that tests notice (JOBS=14: 9 minutes)
	$(BIN)/python -m benchmarks.mutation --count 200 --seed $(or $(SEED),1) --jobs $(or $(JOBS),2)

faults: $(VENV)/.engine  ## kills, signals and damaged checkpoints; write the table (ten minutes)
	$(BIN)/python benchmarks/faults.py

slurm-test: $(VENV)/.engine  ## jobs in a real SLURM; two hosts in network namespaces (as root; up to ten minutes)
	$(BIN)/python -m pytest -m slurm tests/slurm -vv -rs

# pip install --no-deps --target SITE triton omegaconf antlr4-python3-runtime==4.9.3 einops psutil pyyaml
megatron: $(VENV)/.engine  ## build the models of generated Megatron-LM jobs: MEGATRON_LM=checkout SITE=folder (minutes)
	MEGATRON_LM=$(MEGATRON_LM) MEGATRON_SITE=$(SITE) $(BIN)/python -m pytest -m slow tests/first_hour/test_08_launch_megatron.py -rs
	PYTHONPATH=src:. $(BIN)/python -m benchmarks.against.megatron_model --checkout $(MEGATRON_LM) --site $(SITE)

corpora: setup  ## check the frameworks' own files, with injected defects: CHECKOUTS=folder of checkouts (half an hour)
	PYTHONPATH=src:. $(BIN)/python -m benchmarks.corpora --checkouts $(CHECKOUTS) --inject 120 --write; \
	  status=$$?; $(BIN)/python docs/make.py ci.md && exit $$status

docs: setup  ## regenerate the pages under docs/ (listed in docs/make.py)
	$(BIN)/python docs/make.py

# SITE_URL: where the site will be, for link previews and the sitemap. SITE_PLANS: all popular plans, or some MODEL:GPUS:GOAL.
SITE_PLANS ?= popular
site: $(VENV)/.docs  ## plan pages, catalogue and documentation as static files in build/site (minutes); a broken link is an error
	rm -rf build/site
	$(BIN)/python -m meshwright web --export build/site $(SITE_PLANS:%=--plans %) --docs /docs/index.html --url "$(SITE_URL)"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python -m benchmarks.site_check build/site

budget: $(VENV)/.engine browser  ## speed, size and accessibility of all pages in Chromium; needs build/site (half an hour); LIGHTHOUSE=path adds its scores (half an hour more)
	$(BIN)/python -m benchmarks.web_budget --site build/site --save $(LIGHTHOUSE:%=--lighthouse %)

$(VENV)/.docs: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

bench: setup  ## CPU time of recommend and of the search
	$(BIN)/python benchmarks/adviser_speed.py
	$(BIN)/python benchmarks/search_speed.py

load: setup  ## 50 concurrent clients of the HTTP API (two minutes)
	$(BIN)/python -m benchmarks.web_load

schema: setup  ## fuzz the HTTP API: no server error, responses match OpenAPI (minutes)
	SCHEMA_EXAMPLES=150 $(BIN)/python -m pytest tests/web/test_schema.py

accuracy: setup  ## compare the cost model with published measurements; refit without each source in turn (minutes)
	$(BIN)/python benchmarks/accuracy_report.py --left-out

clean:
	rm -rf $(VENV) dist build
