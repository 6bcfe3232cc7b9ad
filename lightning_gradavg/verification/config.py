"""A config file of LightningCLI as the target of a verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import seed_everything
from lightning.pytorch.cli import LightningCLI
from typing_extensions import override

from lightning_gradavg.verification.targets import Built

__all__ = ["ConfigTarget"]


@dataclass(frozen=True)
class ConfigTarget:
    """The arguments of a LightningCLI: a config file and what overrides it.

    Attributes:
        arguments: What would stand behind `fit`.
        options: Options of the Trainer that override the config's.
        seed: What is seeded where the config says `seed_everything: false`.
    """

    arguments: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def build(self) -> Built:
        """Seed, and build everything anew."""
        seed_everything(self.seed, workers=True, verbose=False)
        cli = _Builder(args=["fit", *self.arguments], parser_kwargs={"prog": "gradavg verify"})
        datamodule: Any = cli.datamodule
        data = {} if datamodule is None else {"datamodule": datamodule}
        return Built(cli.model, data, {**cli.options, **self.options})


class _Builder(LightningCLI):
    """A LightningCLI that builds what `fit` needs, and runs nothing."""

    options: dict[str, Any]

    @override
    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Any:
        given = config.get("callbacks") or []
        self.options = {**config, "callbacks": [*(given if isinstance(given, list) else [given]), *callbacks]}

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""
