"""The table of trainers in docs/frameworks.md: it is complete, and what it says of each trainer holds."""

import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import thresher
import thresher.transformers
import thresher.trl
from helpers import assert_same

pytest.importorskip("trl")
pytest.importorskip("peft")
pytest.importorskip("sentence_transformers")

import datasets
import sentence_transformers as library
import tokenizers
import trl

import grpo_cases
import pair_cases
import sft_cases
from thresher.transformers import checks
from transformers_cases import arguments, texts

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"
TABLE = PAGE.read_text().split("### Trainers of TRL and sentence-transformers")[1].split("###")[0]
ROWS = [
    line.strip("| ").split(" | ")
    for line in TABLE.splitlines()
    if "Trainer" in line[:60] and line[0] == "|"
]
CELLS = {name: row[1:] for row in ROWS for name in re.findall(r"\w+Trainer", row[0])}
RECORDS, SELECTION, SKIPPING = range(3)
N = 24
OBSERVED = {"with_selection_settings": {"observe": True}}


def says_yes(column):
    return sorted(name for name, cells in CELLS.items() if cells[column].startswith("yes"))


@pytest.fixture(autouse=True)
def without_notes_on_experiments(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def trainers_of_trl():
    experimental = importlib.import_module("trl.experimental")
    modules = [trl]
    modules += [
        importlib.import_module(f"trl.experimental.{module.name}")
        for module in pkgutil.iter_modules(experimental.__path__)
        if module.ispkg
    ]
    return [
        getattr(module, name)
        for module in modules
        for name in dir(module)
        if re.fullmatch(r"[A-Z]\w*Trainer", name)
    ]


def test_each_trainer_is_in_the_table():
    names = {kind.__name__ for kind in trainers_of_trl()}
    names |= {name for name in dir(library) if name.endswith("Trainer")}
    assert names == set(CELLS)
    assert says_yes(RECORDS) == ["DPOTrainer", "RewardTrainer", "SFTTrainer"]
    assert says_yes(SELECTION) == ["DPOTrainer", "GRPOTrainer", "RewardTrainer", "SFTTrainer"]
    assert says_yes(SKIPPING) == ["GRPOTrainer"]


def made_by(name, folder, method, **settings):
    if name == "SFTTrainer":
        return sft_cases.trainer(folder, method, "float32", **settings)
    kind = None
    if name == "bema":
        kind = importlib.import_module("trl.experimental.bema_for_ref_model").DPOTrainer
        if method is not None:
            kind = type("Selecting", (thresher.transformers.Selection, kind), {})
    of_pairs = "reward, float32" if name == "RewardTrainer" else "dpo, float32"
    return pair_cases.trainer(folder, method, of_pairs, kind, **settings)


@pytest.mark.parametrize("name", [*says_yes(RECORDS), "bema"])
def test_records_and_selection(name, tmp_path):
    plain = made_by(name, tmp_path, None)
    plain.train()
    observed = made_by(name, tmp_path, thresher.FullData(), **OBSERVED)
    observed.train()
    assert_same(observed.model.state_dict(), plain.model.state_dict())
    assert observed.run.data_map()["times_seen"].tolist() == [2] * N
    settings = {} if name == "SFTTrainer" else OBSERVED
    half = made_by(name, tmp_path, thresher.UniformSubset(keep=0.5), **settings)
    half.train()
    assert half.run.cost.backward < observed.run.cost.backward


def test_exact_skipping(tmp_path):
    plain = grpo_cases.trained(grpo_cases.trainer(tmp_path))
    skipping = grpo_cases.trainer(tmp_path)
    picks = thresher.trl.attach(skipping)
    grpo_cases.trained(skipping)
    assert picks.rows_trained < picks.rows
    pairs = zip(plain.gradients.seen, skipping.gradients.seen, strict=True)
    assert all(torch.allclose(a, b, rtol=0, atol=2e-5 * float(a.abs().max())) for a, b in pairs)


@pytest.mark.parametrize("kind", trainers_of_trl(), ids=lambda kind: f"{kind.__module__}")
def test_a_trainer_of_trl_without_selection_is_refused(kind):
    selecting = type("Selecting", (thresher.transformers.Selection, kind), {})
    check = checks.check_trainer_of_trl
    if kind.__name__ in says_yes(RECORDS):
        check(selecting)
        return
    way_out = r"Train without Selection.*train_dataset=rows.select\(ids\)"
    if kind.__name__ == "GRPOTrainer":
        way_out = r"Use thresher.trl.attach\(trainer\)"
    with pytest.raises(ValueError, match=f"{kind.__name__} of TRL is not supported. .*{way_out}"):
        check(selecting)


@pytest.mark.parametrize("name", ["KTOTrainer", "ORPOTrainer"])
def test_rows_are_left_out_by_observing_another_trainer(name, tmp_path):
    observed = made_by("RewardTrainer", tmp_path, thresher.FullData(), **OBSERVED)
    observed.train()
    suspects = set(observed.run.data_map().suspects(6).tolist())
    rows = pair_cases.data().select([i for i in range(N) if i not in suspects])
    module = trl if name == "KTOTrainer" else importlib.import_module("trl.experimental.orpo")
    config = getattr(module, name.replace("Trainer", "Config"))
    kind = getattr(module, name)

    def made(kind, **own):
        quiet = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}
        args = config(
            str(tmp_path),
            per_device_train_batch_size=4,
            num_train_epochs=1,
            save_strategy="no",
            **quiet,
        )
        if name == "KTOTrainer":
            own["ref_model"] = pair_cases.reference()
        return kind(
            sft_cases.model(), args=args, train_dataset=rows, processing_class=texts()[1], **own
        )

    trainer = made(kind)
    trainer.train()
    assert trainer.state.global_step == -(-len(trainer.train_dataset) // 4)
    selecting = type("Selecting", (thresher.transformers.Selection, kind), {})
    with pytest.raises(ValueError, match=f"{name} of TRL is not supported. .*RewardTrainer"):
        made(selecting, selection=thresher.FullData())
    later = thresher.transformers.Selection.add_to(made(kind), thresher.FullData())
    with pytest.raises(ValueError, match=f"{name} of TRL is not supported. .*RewardTrainer"):
        later.train()


PAIRS = {
    "anchor": [f"w{i} w{i * 7 % N}" for i in range(N)],
    "positive": [f"w{i} w{i * 4 % N}" for i in range(N)],
}
RANKING = {
    "SentenceTransformer": ("sentence_transformer", "MultipleNegativesRankingLoss"),
    "SparseEncoder": ("sparse_encoder", "SparseMultipleNegativesRankingLoss"),
    "MultiVectorEncoder": ("multi_vector_encoder", "MultiVectorMultipleNegativesRankingLoss"),
    "CrossEncoder": ("cross_encoder", "BinaryCrossEntropyLoss"),
}


def saved_network(folder):
    names = ["[PAD]", "[UNK]", "[MASK]", *(f"w{i}" for i in range(N))]
    tokens = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    sizes: Any = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(names), **sizes))
    net.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    ).save_pretrained(folder)


CASES = [("SentenceTransformer", batches) for batches in ("no_duplicates", "group_by_label")]


@pytest.mark.parametrize(
    ("kind", "batches"), [*((name, "batch_sampler") for name in RANKING), *CASES]
)
def test_sentence_transformers(kind, batches, tmp_path):
    saved_network(tmp_path)
    package, loss = RANKING[kind]
    columns = PAIRS
    if kind == "CrossEncoder":
        columns = PAIRS | {"label": [float(i % 2) for i in range(N)]}
    if batches == "group_by_label":
        columns = {"sentence": PAIRS["anchor"], "label": [i % 3 for i in range(N)]}
        loss = "BatchAllTripletLoss"
    losses = importlib.import_module(f"sentence_transformers.{package}.losses")

    def trained(method, **settings):
        torch.manual_seed(0)
        model = getattr(library, kind)(str(tmp_path), device="cpu")
        args = getattr(library, f"{kind}TrainingArguments")(
            output_dir=str(tmp_path / "out"),
            num_train_epochs=2,
            per_device_train_batch_size=8,
            batch_sampler=batches,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = getattr(library, f"{kind}Trainer")
        if method is not None:
            trainer = type("Selecting", (thresher.transformers.Selection, trainer), {})
            settings |= {"selection": method}
        data = datasets.Dataset.from_dict(columns)
        computed = getattr(losses, loss)(model)
        if kind == "SparseEncoder":
            computed = losses.SpladeLoss(model, computed, document_regularizer_weight=0.1)
        trainer(model, args, train_dataset=data, loss=computed, **settings).train()
        return model.state_dict()

    assert_same(trained(thresher.FullData()), trained(None))
    way_out = r"in-batch negatives.*Use selection=thresher.FullData\(\) without observe"
    with pytest.raises(ValueError, match=way_out):
        trained(0.5)
    with pytest.raises(ValueError, match=way_out):
        trained(thresher.FullData(), selection_settings={"observe": True})


def test_a_cross_encoder_is_observed_in_a_trainer_of_transformers(tmp_path):
    saved_network(tmp_path)
    encoder = library.CrossEncoder(str(tmp_path), num_labels=2, device="cpu")
    rows = [
        {**encoder.tokenizer(*pair), "labels": i % 2}
        for i, pair in enumerate(zip(*PAIRS.values(), strict=True))
    ]
    kind = type("Selecting", (thresher.transformers.Selection, transformers.Trainer), {})
    made = kind(
        encoder.model,
        arguments(tmp_path, num_train_epochs=2),
        train_dataset=rows,
        selection=thresher.FullData(),
        selection_settings={"observe": True},
    )
    made.train()
    assert made.run.data_map()["times_seen"].tolist() == [2] * N
