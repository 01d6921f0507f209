"""`hvdtrain parity`: a certificate that a job trains to the same weights under both backends."""

from __future__ import annotations

import click

from hvdtrain.bench.stop_signals import stop_signals_raise
from hvdtrain.errors import EXIT_DONE, EXIT_FAILED


@click.command()
@click.argument("file", type=click.Path())
@click.option("-np", "--num-proc", "num_ranks", default=2, show_default=True, type=click.IntRange(min=1), help="Ranks.")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(min=1), help="Steps to compare.")
@click.option(
    "--compression",
    "compressions",
    multiple=True,
    type=click.Choice(["none", "fp16"]),
    help="Also several: --compression none --compression fp16. Default: the file's.",
)
@click.option(
    "--tolerance",
    default=1e-5,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Largest relative difference of a loss and of the weights.",
)
@click.option(
    "--compressed-tolerance",
    default=5e-2,
    show_default=True,
    type=click.FloatRange(min=0),
    help="The same where a run compresses its gradients.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key: --set optimizer.lr=0.1")
@click.option(
    "--output", metavar="DIR", help="Folder of the certificate. Default: the file's output folder and -parity."
)
@click.option(
    "--limit", "limit_s", default=1800.0, show_default=True, type=click.FloatRange(min=1), help="Of a run, seconds."
)
@click.option("--json", "as_json", is_flag=True, help="Print the certificate as JSON and nothing else.")
def command(
    file: str,
    num_ranks: int,
    steps: int,
    compressions: tuple[str, ...],
    tolerance: float,
    compressed_tolerance: float,
    overrides: tuple[str, ...],
    output: str | None,
    limit_s: float,
    as_json: bool,
) -> int:
    """Train the first steps of the job in FILE under ddp and under horovod, and compare.

    Starts its own ranks on this machine. Compares the losses step by step and the weights at the end, and writes
    certificate.json and certificate.md.

    Exit status: 0 within the tolerance; 1 not, or a run failed; 2 the input is wrong.
    """
    from hvdtrain.parity.runs import make_run, plan_runs

    plans, config = plan_runs(file, compressions, overrides, output)
    # Late: torch takes seconds to import, and a wrong file should say so at once.
    from hvdtrain.metrics.plain_json import to_json
    from hvdtrain.parity import certificate as writing

    with stop_signals_raise():
        runs = [make_run(plan, file, steps=steps, num_ranks=num_ranks, limit_s=limit_s) for plan in plans]
    tolerances = writing.Tolerances(tolerance, compressed_tolerance)
    comparisons = [writing.compare(first, second, tolerances) for first, second in writing.pairs(runs)]
    document = writing.certificate(file, config, runs, comparisons, steps=steps, num_ranks=num_ranks)
    _, readable = writing.write_certificate(document, plans[0].output.parents[1])
    if as_json:
        click.echo(to_json(document))
    else:
        click.echo(writing.comparison_table(document))
        for comparison in comparisons:
            for problem in comparison.problems:
                click.echo(f"{comparison.first.plan.name} and {comparison.second.plan.name}: {problem}")
        click.echo(f"{'Passed' if document['passed'] else 'FAILED'}: {readable}")
    return EXIT_DONE if document["passed"] else EXIT_FAILED
