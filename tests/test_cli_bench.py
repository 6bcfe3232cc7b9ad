"""The command `gradavg bench`: its predictions, its measurement, and its errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.prediction import compare, way_of
from benchmarks.prediction import main as run_prediction
from lightning_gradavg.cli import main as run_gradavg
from lightning_gradavg.cli.bench import main
from lightning_gradavg.costs.allreduce import ALGORITHMS, Layout
from lightning_gradavg.costs.links import BYTES_PER_NUMBER, Link, Links, Stages
from lightning_gradavg.costs.predict import Prediction, Way, Work, predict

DOCS = Path(__file__).parent.parent / "docs" / "cost_model.md"
STEP = ["--model", "--gradient-mb", "44.7", "--compute-ms", "20", "40"]
LINK = ["--alpha-us", "100", "--bandwidth-mbit", "800"]
WITHIN = ["--alpha-within-us", "10", "--bandwidth-within-mbit", "8000"]


@pytest.fixture(autouse=True)
def _width_of_a_pipe(monkeypatch):
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def lines_of(capsys, *argv):
    """Return what the command prints, one space for each gap."""
    assert 0 == main(argv), capsys.readouterr().err
    printed = capsys.readouterr()
    assert "" == printed.err
    return [" ".join(line.split()) for line in printed.out.splitlines()]


def test_tables_of_predictions(capsys):
    """44.7 MB at 100 MB/s: the second bucket is ready at 44.4 ms and takes 262.3 ms, and the last one 174.6 ms."""
    lines = lines_of(capsys, *STEP, *LINK, "--ranks", "1", "2", "4096")
    work = Work(44.7e6, 0.02, 0.04)
    links = Links(Link(1e-4, 1e8), Link(1e-4, 1e8))
    expected = [1e3 * predict(Way(name), work, Layout(2, 1), links).step for name in ALGORITHMS]
    assert pytest.approx(44.397 + 262.344 + 174.570, abs=0.01) == expected[0]
    assert f"2 x 1 {' '.join(f'{value:.4g}' for value in expected)}" in lines
    assert "1 x 1 60 60 60 60" in lines
    assert 3 * len(BYTES_PER_NUMBER) == len([line for line in lines if re.match(r"\d+ x 1 [\d. ]+$", line)])
    (largest,) = [line for line in lines if line.startswith("4096 x 1") and "tree" in line]
    assert largest.endswith("NCCL_ALGO=Tree, ddp_comm_hook=bf16_compress_hook")


def test_defaults_go_to_4096_ranks(capsys):
    """Powers of two from 2 to 4096, every wire type, every algorithm."""
    assert 0 == main([*STEP, *LINK, "--json"])
    found = json.loads(capsys.readouterr().out)
    ranks = [one["layout"]["nodes"] * one["layout"]["ranks_per_node"] for one in found["predictions"]]
    assert [2**power for power in range(1, 13)] == sorted(set(ranks))
    ways = {(one["way"]["algorithm"], one["way"]["wire_dtype"]) for one in found["predictions"]}
    assert {(algorithm, wire) for algorithm in ALGORITHMS for wire in BYTES_PER_NUMBER} == ways
    assert len(ways) * 12 == len(ranks)


def test_figures_of_a_file(capsys, tmp_path):
    """Figures of a file are used, options take their place, and what is written is what is printed."""
    links = Links(Link(1e-5, 1e9), Link(1e-4, 1e8), {"int8": Stages(1e-9, 2e-9, 3e-9)}, sum=1e-10)
    links.save(tmp_path / "links.json")
    argv = [*STEP, "--links", str(tmp_path / "links.json"), "--ranks", "8", "--ranks-per-node", "4"]
    argv += ["--bandwidth-mbit", "1600", "--output", str(tmp_path / "out.json"), "--json", "--no-overlap"]
    assert 0 == main([*argv, "--bucket-mb", "5", "--wire-dtypes", "int8"])
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "out.json").read_text("utf-8"))
    faster = Links(links.within, Link(1e-4, 2e8), links.stages, links.sum)
    assert faster == Links.from_dict(found["links"])
    work = Work(44.7e6, 0.02, 0.04, bucket_bytes=5 * 2**20, overlap=False)
    for one in found["predictions"]:
        expected = predict(Way(one["way"]["algorithm"], "int8"), work, Layout(2, 4), faster)
        assert expected.step == one["step"]
        assert {field.name for field in fields(Prediction)} == set(one)


def test_curves(capsys, tmp_path):
    """The scaling curves are drawn into the file that is named."""
    lines_of(capsys, *STEP, *LINK, "--ranks", "2", "4", "--plot", str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*STEP, "--ranks", "6", "--ranks-per-node", "4", *LINK], "6 ranks do not fill nodes of 4 ranks"),
        ([*STEP, "--ranks", "0", *LINK], "0 ranks do not fill nodes"),
        ([*STEP, "--alpha-us", "5"], "give --bandwidth-mbit as well"),
        ([*STEP, *LINK, "--alpha-within-us", "5"], "give --bandwidth-within-mbit as well"),
        ([*STEP, "--bandwidth-mbit", "5"], "give --alpha-us as well"),
        ([*STEP, "--alpha-us", "-5", "--bandwidth-mbit", "5"], "--alpha-us must be finite and >= 0, got -5.0"),
        ([*STEP, "--alpha-us", "5", "--bandwidth-mbit", "0"], "--bandwidth-mbit must be finite and > 0, got 0.0"),
        (STEP, "nothing is known of the links between nodes: give --alpha-us and --bandwidth-mbit"),
        ([*STEP, *LINK, "--ranks-per-node", "2"], "nothing is known of the links within a node"),
        ([*STEP, "--ranks", "1"], "there is nothing to predict: --ranks are all 1"),
        ([*STEP, "--links", "no.json"], "'no.json' cannot be read as figures of links"),
        (["--model", "--compute-ms", "1", "2"], "--model needs --gradient-mb"),
        (["--model", "--gradient-mb", "1"], "--model needs --compute-ms"),
        ([*STEP, *LINK, "--compute-ms", "-1", "2"], "forward must be finite and >= 0, got -0.001"),
        ([*STEP, *LINK, "--bucket-mb", "0"], "bucket_bytes must be finite and > 0, got 0.0"),
        ([*STEP, *LINK, "--wire-dtypes", "fp8"], "argument --wire-dtypes: invalid choice: 'fp8'"),
        ([*STEP, *LINK, "--repeats", "3"], "--repeats is for measuring, not for --model"),
        ([*STEP, *LINK, "--sum-ns", "-3"], "sum must be a finite number >= 0, got -3e-09"),
        ([*STEP, *LINK, "--plot", "curves.xyz"], "the plot 'curves.xyz' cannot be written"),
        ([*STEP, *LINK, "--output", "no/such/folder"], "--output='no/such/folder' cannot be written"),
        (["--links", "links.json"], "--links is for predictions. Add --model"),
        (["--gradient-mb", "3"], "--gradient-mb is for predictions. Add --model"),
        (["--ranks", "2", "4"], "--ranks 2 4: links are measured for one number. Give one, or add --model"),
        (["--ranks", "1"], "a link has two ends: --ranks must be 2 or more, got 1"),
        (["--repeats", "0"], "--repeats must be 1 or more, got 0"),
        (["--alpha-us", "3"], "give --bandwidth-mbit as well"),
        (["--interface", "no such"], "--interface='no such' is not a network interface of this machine; it has ["),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(argv, message, capsys, tmp_path, monkeypatch):
    """Whoever finds it, the parser or the model: one line on standard error that quotes the value, and code 2."""
    monkeypatch.chdir(tmp_path)
    try:
        code = main(argv)
    except SystemExit as exit_:
        code = exit_.code
    printed = capsys.readouterr()
    assert (2, "") == (code, printed.out)
    assert printed.err.startswith("gradavg bench: error: ")
    assert 1 == printed.err.count("\n")
    assert message in printed.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "2"], "--ranks 2: torchrun has started the ranks. Leave it out"),
        (["--alpha-us", "5"], "--alpha-us 5.0: it is measured between these 2 nodes. Leave it out"),
    ],
)
def test_what_a_rank_refuses(argv, message, capsys, monkeypatch):
    """What torchrun decides, or what is measured, is no option."""
    for name, value in (("LOCAL_RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert 2 == main(argv)
    assert message in capsys.readouterr().err


def test_gradavg_has_the_command(capsys):
    """`gradavg bench` is this command, and the list of commands names it."""
    assert 0 == run_gradavg(["bench", *STEP, *LINK, "--ranks", "2"])
    assert "Predicted, not measured: 44.7 MB of gradients, 20 + 40 ms" in capsys.readouterr().out
    assert 0 == run_gradavg(["--help"])
    assert "bench" in capsys.readouterr().out


def test_help_names_every_option_of_the_documentation(capsys):
    """The tables of options in the documentation and the help of the command name the same options."""
    with pytest.raises(SystemExit):
        main(["--help"])
    helped = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    table = [line for line in DOCS.read_text("utf-8").splitlines() if line.startswith("| `--")]
    assert helped == {option for line in table for option in re.findall(r"--[a-z-]+", line.split("|")[1])}


@pytest.mark.slow
def test_links_from_command_to_file(tmp_path):
    """Without a launcher the command starts two ranks, prints what they found, and writes a file to predict from."""
    path = tmp_path / "links.json"
    command = [sys.executable, "-m", "lightning_gradavg", "bench", "--repeats", "1", "--output", str(path)]
    given = ["--ranks", "2", *LINK]
    done = subprocess.run([*command, *given], capture_output=True, text=True, timeout=100, check=False)
    assert 0 == done.returncode, done.stderr
    assert "Links of 2 ranks on 1 nodes (gloo, cpu)" in done.stdout
    links = Links.load(path)
    assert Link(1e-4, 1e8) == links.between
    assert set(BYTES_PER_NUMBER) == set(links.stages)
    assert 0 == main([*STEP, "--links", str(path), "--ranks", "2", "4096"])


def results(nodes, ranks, **seconds):
    return {
        "model": "m",
        "title": "a model",
        "gradient_bytes": 44_700_000,
        "nodes": nodes,
        "world_size": nodes * ranks,
        "order": [name.replace("_", " ") for name in seconds] + ["DDP, float16 hook"],
        "seconds": {name.replace("_", " "): found for name, found in seconds.items()},
    }


def test_prediction_beside_measurement(capsys, tmp_path):
    """A measured step of 400 ms that is predicted to take 481 is off by 20 %; other variants are left out."""
    links = Links(Link(1e-4, 1e8), Link(1e-4, 1e8))
    saved = results(2, 1, compute_only=[0.05, 0.06, 0.07], DDP=[0.3, 0.4, 0.5], communication_only=[0.4], other=[1.0])
    step, alone = compare(saved, links)
    assert ("DDP", Way("ring"), 0.4) == (step.name, step.way, step.measured.median)
    assert predict(Way("ring"), Work(44.7e6, 0.02, 0.04), Layout(2, 1), links).step == pytest.approx(step.predicted)
    assert pytest.approx(step.predicted / 0.4 - 1) == step.error
    assert 0.447 < alone.predicted < 0.45
    links.save(tmp_path / "links.json")
    (tmp_path / "results.json").write_text(json.dumps({"models": [saved]}), "utf-8")
    run_prediction(["--links", str(tmp_path / "links.json"), str(tmp_path / "results.json")])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"ring, float32 │ {1e3 * step.predicted:.1f} │ 400.0 [350.0, 450.0] │ {step.error:+.1%}" in printed
    with pytest.raises(ValueError, match="m: 'compute only' was not measured"):
        compare(results(2, 1, DDP=[1.0]), links)


@pytest.mark.parametrize(
    ("name", "alone", "in_groups"),
    [
        ("DDP", Way("ring"), Way("ring")),
        ("DDP, bucket views", Way("ring"), Way("ring")),
        ("DDP, bfloat16 hook", Way("ring", "bfloat16"), Way("ring", "bfloat16")),
        ("DDP, PowerSGD rank 1", None, None),
        ("Lightning DDPStrategy, no termination flag", Way("ring"), Way("ring")),
        ("communication only, int8 on the wire", Way("scattered", "int8"), Way("node by node", "int8")),
        ("GradAvg mean", Way("ring"), Way("ring")),
        ("GradAvg mean, node by node", Way("node by node"), Way("node by node")),
        ("GradAvg weighted_mean", Way("ring"), Way("node by node")),
        ("GradAvg weighted_mean, flat", Way("ring"), Way("ring")),
        ("GradAvg sum, float16 on the wire", Way("scattered", "float16"), Way("node by node", "float16")),
        ("GradAvg sum, float16 on the wire, flat", Way("scattered", "float16"), Way("scattered", "float16")),
        ("average_gradients, weighted_mean", Way("ring"), Way("ring")),
        ("all-reduce per parameter", None, None),
    ],
)
def test_variants_that_the_model_knows(name, alone, in_groups):
    """Each variant of the benchmark is the way that it goes with one rank per node, and with two."""
    assert (alone, in_groups) == (way_of(name, Layout(2, 1)), way_of(name, Layout(2, 2)))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--backward-fraction", "1.5", "results.json"], "--backward-fraction is from 0 to 1; got 1.5"),
        (["results.json"], "'no.json' cannot be read as figures of links"),
    ],
)
def test_bad_arguments_of_the_comparison(argv, message, capsys, tmp_path, monkeypatch):
    """What cannot be compared is quoted."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run_prediction(["--links", "no.json", *argv])
    assert message in capsys.readouterr().err
