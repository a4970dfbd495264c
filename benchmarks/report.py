"""Write the tables of `docs/performance.md` from the results that are kept beside the benchmarks.

python benchmarks/report.py            # writes them
python benchmarks/report.py --check    # ends with 1 if they are not those of the results
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.results import TARGETS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"
PAGE = ROOT / "docs" / "performance.md"

RESULT_NAMES = ("pool_vs_ram", "rotation", "tiers", "first_token", "multi_gpu")
# Under which name a figure keeps the speed that its own is compared with: RAM's, the plain disk's, its own alone.
_BESIDE = ("ram_gbps", "one_way_gbps", "plain_gbps", "alone_gbps")

Result = Mapping[str, Any]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 9.95 else f"{value:.1f}"


def machine(results: Mapping[str, Result]) -> str:
    """The machine and the versions, in one paragraph for each benchmark."""
    paragraphs = []
    for name, found in results.items():
        host, versions = found["machine"], found["versions"]
        gpu = host.get("gpu")
        what = f"one {gpu['name']} ({gpu['memory_gb']:.0f} GB), " if gpu else ""
        places = ", ".join(f"{place} on {fs_type}" for place, fs_type in host["directories"].items())
        used = ", ".join(f"{package} {version}" for package, version in versions.items())
        paragraphs.append(
            f"`{name}`: {found['date'][:10]}, {what}{host['cpu']}, {host['cores']} cores, {host['ram_gb']:.0f} GB RAM, "
            f"Linux {host['kernel']}; {places}; {used}."
        )
    return "\n\n".join(paragraphs)


def bus(results: Mapping[str, Result]) -> str:
    """What the bus can do, as it was measured between the other measurements."""
    rows = [
        [f"`{name}`", *(_rate(found["bus"].get(key)) for key in ("to_device_gbps", "from_device_gbps", "both_gbps"))]
        for name, found in results.items()
        if "bus" in found
    ]
    return (
        _table(["GB/s, large page-locked copies", "to the GPU", "from the GPU", "both at once"], rows) if rows else ""
    )


def figures(results: Mapping[str, Result]) -> str:
    """Every figure beside its target, and the two speeds of one run that it is the ratio of."""
    found = {name: figure for result in results.values() for name, figure in result.get("figures", {}).items()}
    rows = []
    for name, target in TARGETS.items():
        if name not in found:
            continue
        figure = found[name]
        wanted = "reported" if target.value is None else f"{target.bound} {target.value:g} {target.unit}".rstrip()
        if figure["value"] is None:
            rows.append([target.what, "not measured", wanted, "", "", figure["reason"].replace("|", "\\|")])
            continue
        reached = {True: "yes", False: "**no**", None: ""}[figure["met"]]
        beside = [_rate(figure.get("gbps")), _rate(next((figure[key] for key in _BESIDE if key in figure), None))]
        value = f"{figure['value']:.3g} {target.unit}".rstrip()
        rows.append([target.what, value, wanted, reached, *beside])
    heads = ["figure", "measured", "target", "reached", "GB/s", "what it is beside, GB/s"]
    return _table(heads, rows) if rows else ""


def speeds(results: Mapping[str, Result]) -> str:
    """Every contender's take and park."""
    rows = []
    for found in results.get("pool_vs_ram", {}).get("contenders", {}).values():
        if "take_gbps" in found:
            rows.append([found["title"], _rate(found["take_gbps"]), _rate(found["park_gbps"]), f"`{found['path']}`"])
        else:
            rows.append([found["title"], "", "", f"did not take part: {found['reason']}".replace("|", "\\|")])
    return _table(["GB/s, medians", "take", "park", "path"], rows) if rows else ""


def rotation(results: Mapping[str, Result]) -> str:
    """The tax of a turn, in the report's three lines."""
    rows = []
    for found in results.get("rotation", {}).get("contenders", {}).values():
        if "tax_ms" in found:
            cells = [f"{found[f'{line}_ms']:,.1f}" for line in ("gave_back", "takes", "parked", "tax")]
            rows.append([found["title"], *cells])
        else:
            rows.append([found["title"], "", "", "", f"did not take part: {found['reason']}".replace("|", "\\|")])
    return _table(["ms a turn, medians", "gave back", "takes", "parked", "together"], rows) if rows else ""


def first_token(results: Mapping[str, Result]) -> str:
    """The ways to the first token, at every length."""
    lengths = list(results.get("first_token", {}).get("first_token", {}).values())
    if not lengths:
        return ""
    rows = [
        [way["title"], *(f"{found['ways'][name]['ms']:,.1f}" for found in lengths)]
        for name, way in lengths[0]["ways"].items()
    ]
    rows.append(["its bytes at the bus's speed", *(f"{found['bytes_ms']:,.1f}" for found in lengths)])
    heads = [f"{found['tokens']:,} tokens, {found['bytes'] / 1e9:.1f} GB" for found in lengths]
    return _table(["ms to the first token, medians", *heads], rows)


SECTIONS: dict[str, Callable[[Mapping[str, Result]], str]] = {
    "machine": machine, "bus": bus, "figures": figures, "speeds": speeds, "rotation": rotation,
    "first_token": first_token,
}  # fmt: skip


def filled(page: str, results: Mapping[str, Result]) -> str:
    """The page with each section, between its markers, as the results have it."""
    for name, section in SECTIONS.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        text = section(results)
        body = f"{begin}\n\n{text}\n\n{end}" if text else f"{begin}\n{end}"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page needs the markers {begin} and {end}, once each")
        before, _, rest = page.partition(begin)
        page = before + body + rest.partition(end)[2]
    return page


def main(
    results: Annotated[Path, typer.Option(help="The directory of the results.", show_default=False)] = RESULTS,
    page: Annotated[Path, typer.Option(help="The page to write.", show_default=False)] = PAGE,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; end with 1 if there is a difference.")] = False,
) -> None:
    """Write the tables of the performance page from the results."""
    files = [results / f"{name}.json" for name in RESULT_NAMES]
    found = {file.stem: json.loads(file.read_text()) for file in files if file.exists()}
    before = page.read_text()
    after = filled(before, found)
    if check:
        raise typer.Exit(int(after != before))
    page.write_text(after)
    print(f"{page}: {', '.join(found) or 'no results'}")


if __name__ == "__main__":
    typer.run(main)
