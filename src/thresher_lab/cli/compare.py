"""`thresher compare`: trains methods beside full training and beside controls of the same cost."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from thresher_lab.cli._comparison import (
    after_a_loss,
    cluster_of,
    print_dry_run,
    print_rate,
    run_and_print,
)
from thresher_lab.cli._console import (
    STANDARD_OUTPUT,
    AccumulateOption,
    BatchSizeOption,
    CpusOption,
    DataOption,
    DeviceOption,
    EpochsOption,
    GpusOption,
    JsonOption,
    OptionalTaskOption,
    OutOption,
    QuietOption,
    RayOption,
    ScriptArgument,
    SeedsOption,
    TogetherJobsOption,
    training_of,
    use_device,
)

COMPARED_METHODS_HELP = (
    "Methods to compare, separated by commas; settings follow after colons, such as infobatch,kakurenbo:tau=0.5. "
    "`thresher methods` lists the methods and their settings."
)
BUDGET_HELP = (
    "Shares of the cost of full training, separated by commas, such as 0.5,0.35,0.25: trains the method winnow with each of "
    "them. The report draws the metric over the cost."
)
CONTROLS_HELP = (
    "Controls of each method, separated by commas: shorter@time (as many epochs as fit into its time); and at its cost uniform "
    "(a random subset each epoch), shorter (fewer epochs), smaller (as many steps, with smaller batches), placebo (the method "
    "with its losses or scores permuted among samples), fewer (few samples, many epochs: one random subset in all epochs). "
    "Default: the first five, without those that a method or the training cannot have, which the output names; "
    '"" trains none.'
)
MARGIN_HELP = (
    "A loss of the metric up to this size does not matter: in percentage points where the metric is a share, else in the unit "
    "of the metric. Default: 0.5 points, or a twentieth of the metric of full training."
)


QUICK_HELP = "Train with the first seed only, and without controls: a first look, which shows nothing for certain."
RATES_HELP = (
    "Factors on the learning rate, separated by commas, such as 0.5,1,2: every method and every control is tried with each "
    "of them, on two seeds that do not count, and is compared with the one of the largest metric. Default: the "
    "rate of the training."
)
UNTIL_HELP = (
    "Look after each seed from the third on, and stop when each method is decided: whether it loses more than the margin, and how "
    "it stands against shorter@time. Intervals are valid at every look. --seeds are the most to train, such as 0-11."
)
DRY_RUN_HELP = (
    "Print what would run and what is finished already, and how long the rest takes by the finished runs. Nothing is trained "
    "or written."
)


def compare(
    *,
    script: ScriptArgument = None,
    task: OptionalTaskOption = None,
    methods: Annotated[str | None, typer.Option(help=COMPARED_METHODS_HELP)] = None,
    budget: Annotated[str | None, typer.Option(help=BUDGET_HELP)] = None,
    epochs: EpochsOption,
    out: OutOption,
    seeds: SeedsOption = "0,1,2",
    data: DataOption = None,
    batch_size: BatchSizeOption = None,
    accumulate: AccumulateOption = None,
    jobs: TogetherJobsOption = None,
    device: DeviceOption = None,
    ray: RayOption = None,
    gpus_per_run: GpusOption = 0.0,
    cpus_per_run: CpusOption = 1,
    margin: Annotated[float | None, typer.Option(help=MARGIN_HELP)] = None,
    controls: Annotated[str | None, typer.Option(help=CONTROLS_HELP)] = None,
    rates: Annotated[str | None, typer.Option(help=RATES_HELP)] = None,
    track: Annotated[
        str | None, typer.Option(help="Tracker of accelerate that logs every epoch, such as wandb.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=QUICK_HELP)] = False,
    until: Annotated[Literal["decided"] | None, typer.Option(help=UNTIL_HELP)] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete the runs in --out, and begin anew.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN_HELP)] = False,
    json: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Train every method with every seed, beside full training and controls of the same cost.

    Prints a table with a verdict on each method, and writes DIR/results.json and DIR/report.html. Started by torchrun or
    accelerate launch (`torchrun --nproc-per-node 2 -m thresher compare ...`), all processes train each run together.
    """
    from thresher_lab.comparison.controls import parse_budget, parse_controls, parse_rates
    from thresher_lab.recipes.running import with_batch_of
    from thresher_lab.training.specs import parse_seeds

    if methods is None and budget is None:
        raise ValueError(
            "compare: give --methods, such as infobatch, or --budget, such as 0.5,0.35"
        )
    cluster = cluster_of(ray, gpus_per_run, cpus_per_run, here=bool(device or dry_run))
    use_device(device)
    training = print_rate(with_batch_of(training_of(script, task), batch_size, accumulate))
    kinds = None if controls is None else parse_controls(controls)
    if budget is None:
        kept = []
    else:
        kept = [f"winnow:share={share:g}" for share in parse_budget(budget)]
    asked = ",".join(filter(None, (methods, *kept)))
    if quick and (until or controls or rates):
        raise ValueError(
            "compare: --quick trains one seed without controls; leave out --until, --controls and --rates"
        )
    factors = {} if rates is None else {"factors": parse_rates(rates)}
    if quick:
        seeds = f"{parse_seeds(seeds)[0]}"
        kinds = ()
    if dry_run:
        if restart:
            raise ValueError(
                "compare: --dry-run deletes nothing; leave out --restart, or give an --out that is not there yet"
            )
        given = {
            "data": data,
            "jobs": jobs,
            "controls": kinds,
            "until_decided": until is not None,
            **factors,
        }
        print_dry_run(training, asked, seeds, epochs, out, json=json, **given)
        return
    if restart:
        _begin_anew(out, training, asked, seeds)
    given = {
        "data": data,
        "jobs": jobs,
        "margin": margin,
        "track": track,
        "controls": kinds,
        "until_decided": until is not None,
        **factors,
    }
    results = run_and_print(
        training, asked, seeds, epochs, out, json=json, quiet=quiet, cluster=cluster, **given
    )
    again = {
        "epochs": epochs,
        "seeds": seeds,
        "until": until,
        "rates": rates,
        "controls": controls,
        "data": data,
        "jobs": jobs,
        "out": out,
    }
    _print_next(
        results, asked, again, margin, cluster, quick=quick, to_stderr=json == STANDARD_OUTPUT
    )


def _print_next(
    results: Any,
    methods: str,
    given: Any,
    margin: Any,
    cluster: Any,
    *,
    quick: bool,
    to_stderr: bool,
) -> None:
    """Prints the next command after a method has lost, in the first process, and that a quick look decides nothing."""
    given |= {} if margin is None else {"margin": f"{margin:.12g}"}
    if cluster is not None:
        given |= {
            "ray": cluster.address,
            "gpus-per-run": cluster.gpus,
            "cpus-per-run": cluster.cpus,
        }
    after = None if results is None else after_a_loss(results, methods, given)
    if after is not None:
        typer.echo("\n{}\n{}".format(*after), err=to_stderr)
    if quick:
        what = "This was a quick look: one seed, and no controls. Repeat the command without --quick for a verdict."
        typer.echo(what, err=to_stderr)


def _begin_anew(out: Path, training: str, methods: str, seeds: str) -> None:
    """Deletes the runs of a comparison in the first process, after what the command was given is known to be possible."""
    from thresher_lab.recipes.running import task_of
    from thresher_lab.training.processes import own_rank
    from thresher_lab.training.specs import parse_methods, parse_seeds
    from thresher_lab.training.store import restart

    task_of(training)
    for spec in parse_methods(methods):
        spec.create()
    parse_seeds(seeds)
    if own_rank() == 0:
        restart(out)
