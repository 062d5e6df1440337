"""The files that a benchmark leaves: its numbers as JSON, and a PNG drawn from nothing but that JSON."""

import json
from pathlib import Path


def add_output_options(parser):
    parser.add_argument("--json", type=Path, help="write the results, with versions, here")
    parser.add_argument("--plot", type=Path, help="write a PNG here; given the JSON file of an earlier run, "
                        "measure nothing and draw its PNG beside it")


def fill_in(options, defaults):
    """options with the device's defaults where nothing was given."""
    for name, value in defaults[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def measure_rows(options, draw, measure, table, shape, machine):
    """What a benchmark with a row for each sequence length does: measure(seqlen, options) and print it as
    table(row), or draw an earlier run. shape: names of the options that the report repeats."""
    if drawn_earlier_run(options, draw):
        return
    rows = []
    for seqlen in options.seqlens:
        rows.append(measure(seqlen, options))
        print(table(rows[-1]), flush=True)
    repeated = {name: getattr(options, name) for name in shape}
    write({"machine": machine(options.device), "shape": repeated, "rows": rows}, options, draw)


def drawn_earlier_run(options, draw):
    """-> whether --plot names a JSON file, which is then drawn."""
    if not options.plot or options.plot.suffix != ".json":
        return False
    _draw(json.loads(options.plot.read_text()), draw, options.plot.with_suffix(".png"))
    return True


def write(report, options, draw):
    """draw(report, figure) fills a matplotlib Figure."""
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1, default=str) + "\n")
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        _draw(report, draw, options.plot)


def _draw(report, draw, path):
    try:
        from matplotlib.figure import Figure  # without pyplot: needs no display
    except ImportError:
        print(f"{path} is not drawn: no matplotlib here (--plot with the JSON file draws it elsewhere)")
        return
    figure = Figure(layout="constrained")
    draw(report, figure)
    figure.savefig(path, dpi=150)
    print(path)
