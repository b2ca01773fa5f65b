"""``fourfold doctor``: what this machine has, what it does, and whether two ranks agree on it."""

import typer


def doctor() -> None:
    """Check this machine and the installation.

    Shows versions, devices and measured rates, and whether two ranks compute what one does.
    """
    import torch

    from fourfold import doctor as machine
    from fourfold.cli.verify import run_trial
    from fourfold.specs import Layout, ModelSpec
    from fourfold.trial import Trial

    for name, value in machine.facts().items():
        typer.echo(f"{name:10}  {value}")
    typer.echo("")
    every = torch.get_num_threads()
    for dtype in ("float32", "bfloat16"):
        for threads in sorted({1, every}):
            rate = machine.measured_peak_flops(dtype, threads=threads)
            typer.echo(f"matmul {dtype}, {_threads(threads)}: {rate / 1e9:,.1f} GFLOP/s")
    bandwidth = machine.measured_copy_bytes_per_second(threads=every)
    typer.echo(f"memory copy, {_threads(every)}: {bandwidth / 1e9:,.1f} GB/s read and written")
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        rates = [
            f"{dtype} {machine.measured_peak_flops(dtype, device=device) / 1e12:,.1f} TFLOP/s"
            for dtype in ("float32", "bfloat16")
        ]
        copied = machine.measured_copy_bytes_per_second(device=device) / 1e12
        typer.echo(f"GPU {index}: {', '.join(rates)}, memory {copied:,.2f} TB/s")
    typer.echo("")
    layout = Layout.parse("dp1" if torch.cuda.device_count() == 1 else "dp2")
    model = ModelSpec.preset("tiny")
    trial = Trial(model, layout, batch=4, microbatches=1, sequence_length=32, steps=2, dtype="float64")
    report = run_trial(trial)
    if report is None:
        return
    worst = max(report.loss.error, report.norm.error, report.gradients[0].error, report.weights[0].error)
    typer.echo(
        f"equality on {layout}, float64: {'pass' if report.passes else 'FAIL'}, "
        f"largest relative error {worst:.1e}"
    )
    raise typer.Exit(0 if report.passes else 1)


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
