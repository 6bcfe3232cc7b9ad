"""The public contract: what code, configs, scripts and checkpoints of users rely on. A change here breaks theirs."""

from __future__ import annotations

import inspect
import json
import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from ranks import make_trainer
from torch.utils.data import DataLoader
from toys import MemoryLogger, Toy

import lightning_gradavg as package
from lightning_gradavg import GradAvgStrategy, fabric
from lightning_gradavg.cli import main
from lightning_gradavg.verify.report import EXIT_CODES, SCHEMA, Finding, Report
from lightning_gradavg.verify.sketches import Difference


def words(text: str) -> list[str]:
    return text.split()


OWN_OPTIONS = {
    "reduction": "mean",
    "equivalent_to": None,
    "num_replicas": None,
    "split_batches": None,
    "max_device_batch_size": None,
    "reproducible": False,
    "lr_scaling": "none",
    "base_batch_size": None,
    "base_world_size": 1,
    "global_batch_size": None,
    "lr_warmup_steps": 0,
    "allow_recipe_change": False,
    "exact_evaluation": None,
    "check_replicas_every_n_steps": 1000,
    "log_hyperparams": True,
    "gradient_as_bucket_view": None,
}
OPTIONS_OF_DDP_STRATEGY = words(
    "accelerator parallel_devices cluster_environment checkpoint_io precision_plugin ddp_comm_state ddp_comm_hook"
    " ddp_comm_wrapper model_averaging_period process_group_backend timeout start_method"
)
OPTIONS_OF_VERIFY = "strategy='ddp', devices=2, steps=3, tolerance=None, precision='64-true', seed=0"


def test_the_constructor():
    """Every option stands in the signature, by keyword only, with its type and its default."""
    parameters = signature(GradAvgStrategy).parameters
    assert [*OWN_OPTIONS, *OPTIONS_OF_DDP_STRATEGY, "ddp_options"] == list(parameters)
    assert OWN_OPTIONS == {name: parameters[name].default for name in OWN_OPTIONS}
    assert {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD} == {one.kind for one in parameters.values()}
    assert inspect.Parameter.empty not in {one.annotation for one in parameters.values()}


def log_hyperparams(options: dict[str, Any]) -> list[dict[str, Any]]:
    logger = MemoryLogger()
    trainer = make_trainer(GradAvgStrategy(**options), max_epochs=1, logger=logger, log_every_n_steps=1)
    trainer.fit(Toy(), DataLoader(torch.ones(8, dtype=torch.float64), 4))
    return logger.hyperparameters


def test_the_logged_hyperparameters(world):
    """Options alone, the same on any number of ranks: some loggers refuse another value in a run that goes on."""
    options: dict[str, Any] = {"equivalent_to": "data_parallel", "lr_scaling": "linear", "base_batch_size": 2}
    for size in (1, 2, 3):
        (logged,) = world(size).run(log_hyperparams, options)[0]
        assert {"gradavg/reduction": "mean", "gradavg/num_replicas": None} == logged
    assert [[], []] == world(2).run(log_hyperparams, {**options, "log_hyperparams": False})


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (package.GradAvgModelParallelStrategy, "(*, reduction='mean', **options)"),
        (fabric.GradAvgStrategy, "(*, reduction='mean', split_batches=False, **options)"),
        (fabric.GradAvgStrategy.backward, "(self, tensor, module, *args, weight=None, **kwargs)"),
        (package.GradAvgReducer, "(*, reduction='mean')"),
        (package.GradAvgReducer.register, "(self, model, *, node=None, comm_hook=None, comm_state=None)"),
        (package.GradAvgReducer.weigh, "(self, loss, *, weight=None, divided_by=None, samples=None)"),
        (package.average_gradients, "(module_or_parameters, *, reduction='mean', weight=None, group=None)"),
        (package.gather, "(tensors, *, group=None)"),
        (package.global_mean, "(total, count, *, group=None)"),
        (package.split_batches, "(loader, *, group=None)"),
        (package.verify, f"(module, data=None, *, {OPTIONS_OF_VERIFY}, **trainer_options)"),
    ],
)
def test_signatures(function, expected):
    """Names and defaults of parameters; what else is given as an option is refused."""
    found = signature(function)
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values()]
    assert expected == str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def test_the_names():
    """What `from lightning_gradavg import` gives, and the values of `strategy=` of Trainer and Fabric."""
    expected = (
        "GradAvgModelParallelStrategy GradAvgMonitor GradAvgReducer GradAvgStrategy"
        " average_gradients gather global_mean split_batches verify"
    )
    assert words(expected) == sorted(package.__all__)
    of_loops = "gradavg gradavg_fork gradavg_notebook gradavg_spawn gradavg_sum gradavg_weighted gradavg_weighted_mean"
    of_trainer = "gradavg_data_parallel gradavg_model_parallel gradavg_single_device lightning_gradavg.gradavgstrategy"
    registered = {name for name in StrategyRegistry if "gradavg" in name}
    assert {*words(of_loops), *words(of_trainer)} == registered
    assert words(of_loops) == sorted(name for name in STRATEGY_REGISTRY if name.startswith("gradavg"))


def test_one_path_for_each_name():
    """Pages and examples import what the package exports from the package, and other names from one module each."""
    root = Path(__file__).parent.parent
    paths: dict[str, set[str]] = {}
    for page in [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("examples/**/*.py")]:
        for module, names in re.findall(r"from (lightning_gradavg[\w.]*) import ([\w, ]+)", page.read_text("utf-8")):
            for name in names.replace(" ", "").split(","):
                paths.setdefault(name, set()).add(module)
    of_fabric = {"GradAvgStrategy", "GradAvgModelParallelStrategy"}  # classes of the same names for another loop
    for name, modules in paths.items():
        if name in of_fabric:
            modules.discard("lightning_gradavg.fabric")
        expected = {"lightning_gradavg"} if name in package.__all__ else modules
        assert expected == modules, name
        assert len(modules) <= 1, name


def test_the_names_of_a_strategy():
    """What users read and call on it; the rest of its public names are Lightning's."""
    expected = (
        "facts fingerprint global_batch_size has_samples lr_scale names num_replicas observe_next_step observing report"
        " state_digests"
    )
    public = {name for name in dir(GradAvgStrategy) if not name.startswith("_")} - {*dir(DDPStrategy)}
    assert words(expected) == sorted(public)
    assert isinstance(package.GradAvgModelParallelStrategy.has_samples, property)
    assert isinstance(fabric.GradAvgStrategy.samples, property)


@pytest.mark.parametrize(
    ("arguments", "code", "commands"),
    [
        (["--help"], 0, "plan verify"),
        (["plan", "--batch-size", "8", "--lr", "0.1", "--devices-per-node", "2"], 0, ""),
        (["--version"], 0, ""),
        *((wrong, 2, "") for wrong in (["nothing"], [], ["bench", "--ranks", "2"])),
    ],
)
def test_exit_codes(arguments, code, commands, capsys):
    """0 for an answer, 2 for wrong usage with one line on standard error."""
    assert code == main(arguments)
    shown = capsys.readouterr()
    assert code == len([line for line in shown.err.splitlines() if line]) * 2
    assert all(f"\n  {command} " in shown.out for command in words(commands))


def test_the_json_of_plan(capsys):
    arguments = "plan --batch-size 8 --lr 0.1 --optimizer adamw --devices-per-node 3 --nodes 2 --dataset-size 99 --json"
    assert 0 == main(arguments.split())
    plan = json.loads(capsys.readouterr().out)
    assert 2 == plan["schema"]
    of_run = words(
        "world_size loader_batch_size chunks accumulate global_batch_size scale steps_per_epoch steps warmup_steps"
        " mean_loss_gradient sum_loss_gradient scalings"
    )
    of_recipe = words(
        "batch_size lr devices accumulate_grad_batches optimizer betas eps steps dataset_size warmup_steps"
    )
    assert of_recipe == list(plan["recipe"])
    assert ["nodes", "devices_per_node"] == list(plan["cluster"])
    assert all(of_run == list(plan[name]) for name in ("base", "gradavg", "stock_ddp"))
    assert ["samples", "devices", "micro_batch_size"] == list(plan["gradavg"]["chunks"][0])
    assert words("lr_scaling hyperparameters lr_warmup_steps problem largest_global_batch_size") == list(
        plan["gradavg"]["scalings"][0]
    )
    assert {"notes", "code", "nearest_even_batch_sizes"} < set(plan)


def test_the_json_of_verify():
    """The keys of `gradavg verify --json`, schema 4; and a code for each verdict, none that of wrong usage."""
    assert {"equal": 0, "different": 1, "not shown": 3} == EXIT_CODES
    difference = Difference("weight", 0.5, 1.0, 2.0, 0.5)
    finding = Finding("sum loss", "reduced gradient", "detail", difference=difference)
    read = Report("", "", 2, 1, 1e-8, [finding]).as_dict()
    assert 4 == SCHEMA == read["schema"]
    assert words(
        "schema equal verdict stages strategy reduction world_size steps tolerance findings remarks precision baseline"
        " gaps"
    ) == list(read)
    assert "differs" == read["stages"]["reduced gradient"]
    assert words("cause stage detail step difference note") == list(read["findings"][0])
    assert words("name relative found expected factor") == list(read["findings"][0]["difference"])


def save_kept(folder: str) -> Any:
    strategy = GradAvgStrategy(reduction="weighted_mean", split_batches=True, lr_scaling="linear", base_batch_size=2)
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(Toy(), DataLoader(torch.ones(8, dtype=torch.float64), 4))
    trainer.save_checkpoint(f"{folder}/kept.ckpt")
    return None


def test_the_keys_of_a_checkpoint(world, tmp_path):
    """What a checkpoint holds of the strategy, beside what Lightning's own hold."""
    world(2).run(save_kept, str(tmp_path))
    kept = torch.load(tmp_path / "kept.ckpt", weights_only=True)["lightning_gradavg"]
    assert {"recipe", "rates", "data"} == set(kept)
    assert {
        "reduction": "weighted_mean",
        "split_batches": True,
        "equivalent_to": None,
        "num_replicas": None,
        "lr_scaling": "linear",
        "base": "base_batch_size=2",
        "lr_warmup_steps": 0,
    } == kept["recipe"]
    assert {"steps": [2]} == kept["rates"]
    assert words("seed order own loaders") == list(kept["data"])
    (loader,) = kept["data"]["loaders"]
    assert words("passes sources order asked batches digest") == list(loader)
    # After a complete epoch no pass is in progress.
    assert (1, None, 0, 0, "") == tuple(loader[key] for key in words("passes order asked batches digest"))
