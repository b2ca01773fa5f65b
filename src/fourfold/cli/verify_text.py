"""What ``fourfold verify`` prints: a table of one layout, a line for each of many, and their summary."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.trial import Trial
    from fourfold.verify import Verification

SHOWN = 5
"""Parameters in the table of one layout, the worst first."""

HEADING = f"{'layout':44} {'loss':>8} {'gradient':>9} {'norm':>8} {'weights':>8}"


def line(report: "Verification") -> str:
    """One layout of a sweep: the worst relative errors."""
    errors = (report.loss, report.gradients[0], report.norm, report.weights[0])
    loss, gradient, norm, weights = (f"{found.error:.1e}" for found in errors)
    outcome = "ok" if report.passes else "WRONG"
    return f"{report.layout:44} {loss:>8} {gradient:>9} {norm:>8} {weights:>8}  {outcome}"


def summary(trials: "Sequence[Trial]", reports: "Sequence[Verification]") -> str:
    """The outcome of a sweep by the degrees of the axes: the worst of all options that these have."""
    groups: dict[str, list[Verification]] = {}
    for trial, report in zip(trials, reports, strict=True):
        groups.setdefault(str(replace(trial.layout, options={})), []).append(report)
    width = max(len("degrees"), *map(len, groups))
    lines = [f"{'degrees':{width}}  layouts  passed  worst relative error"]
    for degrees, found in groups.items():
        worst = max(_worst_error(report) for report in found)
        passed = sum(report.passes for report in found)
        lines.append(f"{degrees:{width}}  {len(found):7}  {passed:6}  {worst:20.1e}")
    passed = sum(report.passes for report in reports)
    lines.append(f"{'all':{width}}  {len(reports):7}  {passed:6}  {max(map(_worst_error, reports)):20.1e}")
    return "\n".join([*lines, "", "pass" if passed == len(reports) else "FAIL"])


def _worst_error(report: "Verification") -> float:
    return max(report.loss.error, report.norm.error, report.gradients[0].error, report.weights[0].error)


def table(report: "Verification") -> str:
    """Return the outcome as a table, the worst parameter first."""
    from fourfold.specs import Layout

    stream = Layout.parse(report.layout).stream(report.sequence_length)
    lines = [f"{report.layout} against one process, {report.steps} steps of SGD in {report.dtype}"]
    lines += [*filter(None, (stream, report.why_cp)), ""]
    rows = [("loss", report.loss), ("gradient norm", report.norm)]
    rows += [(f"gradient of {found.name}", found) for found in report.gradients[:SHOWN]]
    rows += [(f"weights of {found.name}", found) for found in report.weights[:SHOWN]]
    width = max(len(name) for name, _ in rows)
    lines.append(f"{'':{width}}  relative error  tolerance")
    lines += [
        f"{name:{width}}  {found.error:14.2e}  {found.tolerance:9.1e}  {'ok' if found.passes else 'WRONG'}"
        for name, found in rows
    ]
    others = len(report.gradients) - SHOWN
    if others > 0:
        lines.append(f"and gradients and weights of {others} more parameters, each closer")
    counted = "agree with the dataset" if report.tokens_agree else "DO NOT agree with the dataset"
    lines.append(f"valid tokens by rank: {', '.join(map(str, report.valid_tokens))}, {counted}")
    if report.where:
        lines.append(report.where)
    lines += ["", "pass" if report.passes else "FAIL"]
    return "\n".join(lines)
