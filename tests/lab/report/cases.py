"""A comparison that never was, in the form that one leaves behind."""

import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from thresher_lab.comparison.summary import summarize
from thresher_lab.training.samples import LOSS_BINS, RunHistory, distribution
from thresher_lab.training.store import write_json

EPOCHS = 12
SAMPLES = 50
CLASSES = 5
HOSTILE = """</script><img src=x onerror="document.title='hit'">'&amp;"""
LEAVES_OUT = {"full": 0.0, "kakurenbo": 0.3, "infobatch": 0.4}


def history(method, seed, share, *, epochs=EPOCHS, samples=SAMPLES, classes=CLASSES):
    """Losses that fall with the epochs, the easiest left out more often than others, nothing in the first epoch."""
    rng = np.random.default_rng([zlib.crc32(method.encode()), seed])
    hardness = rng.exponential(size=(samples, 1))
    losses = (
        hardness * np.linspace(1, 0.2, epochs) * rng.uniform(0.8, 1.2, (samples, epochs))
    ).astype(np.float32)
    dropped = (
        np.argsort(np.argsort(losses + rng.uniform(0, 0.2, losses.shape), axis=0), axis=0)
        < share * samples
    )
    dropped[:, 0] = False
    targets = np.arange(samples) % classes if classes else None
    return RunHistory(np.arange(samples), targets, losses, (~dropped).astype(np.uint8))


def run(method, seed, share, *, control_of=None, metric="accuracy", lost=0.0, **sizes):
    of = history(method, seed, share, **sizes)
    rng = np.random.default_rng([zlib.crc32(method.encode()), seed, 1])
    count, epochs = of.losses.shape
    entries, cost, seconds = [], 0.0, 0.0
    for epoch in range(epochs):
        kept = int(of.trained[:, epoch].sum())
        cost, seconds = cost + kept / count / epochs, seconds + 0.01 * kept
        entry = {
            "epoch": epoch,
            "complete": True,
            "kept": kept,
            "forward": kept,
            "backward": kept,
            "steps": 4,
            "step_s": 0.001 * kept,
        }
        entry |= {"scheduled_fraction": share, "actual_fraction": 1 - kept / count, "cost": cost}
        entry |= {
            "cpu_s": seconds,
            "wall_s": 1.1 * seconds,
            metric: 0.9 - 0.4 / (epoch + 1) - lost + rng.uniform(0, 0.004),
        }
        entry |= distribution(of.losses[:, epoch])
        if of.targets is not None:
            entry["hidden_by_class"] = np.bincount(
                of.targets[of.dropped[:, epoch]], minlength=int(of.targets.max()) + 1
            ).tolist()
        entries.append(entry)
    return {
        "method": method,
        "settings": {"max_fraction": share} if share else {},
        "seed": seed,
        "control_of": control_of,
        "metric": {"name": metric, "value": entries[-1][metric]},
        "cost": {
            "forward": 9,
            "backward": 9,
            "refresh": 0,
            "scoring": 0,
            "steps": 4,
            "ratio": cost,
            "backward_to_forward": 2.0,
        },
        "cpu_s": seconds,
        "wall_s": 1.1 * seconds,
        "history": entries,
    }


def comparison(
    leaves_out=LEAVES_OUT,
    seeds=(0, 1, 2),
    *,
    task="mine.py:build",
    controls=True,
    metric="accuracy",
    **sizes,
):
    """ResultsDict, and the histories of the runs of methods."""
    runs, samples = [], {}
    for method, share in leaves_out.items():
        for seed in seeds:
            made = run(method, seed, share, metric=metric, lost=share / 100, **sizes)
            name = f"runs/{len(samples)}.parquet"
            samples[name] = history(method, seed, share, **sizes)
            runs.append(made | {"samples": name})
            ratio = made["cost"]["ratio"]
            for kind in ("uniform", "shorter") if controls and method != "full" else ():
                label = f"{kind}@{ratio:.3f}"
                runs.append(
                    run(
                        label, seed, 1 - ratio, control_of=method, metric=metric, lost=0.01, **sizes
                    )
                )
    results = {
        "task": task,
        "epochs": sizes.get("epochs", EPOCHS),
        "device": "cpu",
        "versions": {"thresher": "0.2.0", "torch": "2.13.0"},
        "margin": 0.5,
        "loss_bins": LOSS_BINS.tolist(),
        "runs": runs,
        "summary": summarize(runs, 0.5),
    }
    return results, samples


def save(folder, results, samples):
    """As a comparison leaves them."""
    write_json(folder / "results.json", results)
    (folder / "runs").mkdir()
    for name, of in samples.items():
        columns = {"id": of.ids, "loss": of.losses[:, -1], "hidden": of.hidden.astype(np.int16)}
        columns |= {"loss_by_epoch": list(of.losses), "trained_by_epoch": list(of.trained)}
        if of.targets is not None:
            columns["target"] = of.targets
        pq.write_table(pa.table(columns), folder / name)
    return folder
