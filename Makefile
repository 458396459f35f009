# Each target does all of its own set-up: Python >= 3.11 with venv, and make, are enough.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Where it is set, pytest would rewrite all tests in every run, ten seconds for each of its workers.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test check coverage mutate soak update clean
help:
	@echo "make demo    install, then the main job on handwritten digits, ending in one table"
	@echo "make test    install, lint, types, tests"
	@echo "make check   lint and types only"
	@echo "make coverage  the tests once more, and the lines that none of them reaches"
	@echo "make mutate ROOM=parity   wrong lines put into vitx/parity one by one: do its tests notice? (docs/mutation.md)"
	@echo "make soak    half an hour of mixed requests against a server"
	@echo "make update  install the newest allowed versions and write them to constraints.txt"
	@echo "make clean   remove .venv, and what make demo and a build have left"

# A stamp is written last, so an interrupted install is repeated; a changed pyproject installs again. What is imported
# is compiled then: of 20,000 modules that pip would compile one after another, most never are.
$(VENV)/.%.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "vitx needs Python >= 3.11: make PYTHON=/path/to/python3.11"; exit 3; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

demo: $(VENV)/.all.stamp
	$(BIN)/vitx demo

check: $(VENV)/.dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy || { test $$? = 2 && $(BIN)/mypy --num-workers 0; }  # 2: its processes did not start within 3 s

# Hundreds of processes and two test workers import the same files: compiled ones are kept, whatever the shell says.
test coverage: export PYTHONDONTWRITEBYTECODE =

test: check
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

coverage: $(VENV)/.dev.stamp
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --cov --cov-report=term-missing:skip-covered

# SAMPLE=100 tries so many of the room's mutants; exit code 1 below the floor of benchmarks/mutation/rooms.toml.
mutate: $(VENV)/.dev.stamp
	@test -n "$(ROOM)" || { echo "which room? make mutate ROOM=parity, or serve/batching, core/files.py, …"; exit 2; }
	$(BIN)/python benchmarks/mutate.py $(ROOM) $(if $(SAMPLE),--sample $(SAMPLE))

soak: $(VENV)/.dev.stamp
	$(BIN)/python benchmarks/serve/soak.py --minutes 30

update:
	rm -rf .venv-update
	$(PYTHON) -m venv .venv-update
	.venv-update/bin/python -m pip install --quiet --upgrade -e '.[dev]'
	.venv-update/bin/python -m pip freeze --exclude-editable | grep -v ' @ ' | sed 's/+[a-z0-9.]*$$//' > constraints.txt
	rm -rf .venv-update

clean:
	rm -rf $(VENV) demo build dist
