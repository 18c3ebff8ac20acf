# `make demo` and `make test` start from a bare checkout: they make .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
LIVE := build/live

demo: $(BIN)/diffcache
	$(BIN)/diffcache demo

test: $(BIN)/diffcache
	$(BIN)/pytest

slow: $(BIN)/diffcache
	$(BIN)/pytest -m slow

lint: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy understands neither package-dir nor __path__, so it reads a folder of links laid out as the wheel.
types: $(BIN)/diffcache
	rm -rf $(LIVE) && mkdir -p $(LIVE)/diffcache
	ln -s $(CURDIR)/diffcache/* $(LIVE)/diffcache/
	for room in kernels pipelines world_models; do \
	  if [ -d $$room ]; then ln -s $(CURDIR)/$$room $(LIVE)/diffcache/; fi; done
	MYPYPATH=$(LIVE) $(BIN)/mypy -p diffcache

format: $(BIN)/diffcache
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: $(BIN)/diffcache
	$(BIN)/python tests/test_readme.py

$(BIN)/diffcache: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist out *.egg-info

.PHONY: demo test slow lint types format readme clean
