"""Training loaders whose batches are split over the ranks, and the Trainer's options that count batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_gradavg._lightning.internals import injects_samplers, set_injection_of_samplers
from lightning_gradavg._lightning.loaders import LoaderWrapper, draws_order, last_batch_size, user_loader
from lightning_gradavg._lightning.methods import method_of, replaced
from lightning_gradavg._lightning.options import Options
from lightning_gradavg._lightning.part import Part, Run, Saved
from lightning_gradavg._lightning.stand_in import buffers_kept, stand_in
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.random_state import (
    RandomState,
    drawing_from,
    restore_random_state,
    stream_key,
)
from lightning_gradavg._support.running import Forward
from lightning_gradavg._support.text import listed_ranks, plural
from lightning_gradavg._support.tree import leaves, mapped
from lightning_gradavg.batches.chunks import STAND_IN, Chunk, Piece, Pieces, Split
from lightning_gradavg.batches.joined import FetchRecord, JoinedLoader, join
from lightning_gradavg.batches.loader import compare_at_times
from lightning_gradavg.batches.order import Watch
from lightning_gradavg.batches.progress import DataState, Fetched, Progress, TrainingLoader
from lightning_gradavg.batches.streams import run_seed

__all__ = ["Batches", "PieceOfBatch", "SplitBatches"]


class PieceOfBatch(NamedTuple):
    """What is computed at once of the batch in training."""

    place: int  # among the pieces of this rank
    samples: int  # that count: none of a stand-in
    batch: Any  # of the user's own type; of several pieces, still to be moved to the device


class _Shortage(NamedTuple):
    """How many ranks have no batches left, and when."""

    epoch: int
    missing: int


class Batches(Part):
    """Every rank has batches of its own, as in stock DDP, some of them perhaps fewer than others.

    For each batch the strategy calls `on_train_batch_start`, and then the step within `training_step`.

    Attributes:
        joins: Whether some ranks may have fewer batches than others.
        chunk: What this rank has of the batch in training; None where the batch is its own, and counts as a whole.
        missing: Number of ranks that have no batch left.
        without_samples: The ranks that have no samples of the batch in training.
    """

    joins: bool = False
    chunk: Chunk | None = None
    missing: int = 0
    without_samples: Sequence[int] = ()

    def setup(self, run: Run) -> None:
        """Forget an earlier run."""
        super().setup(run)
        self.joins = False
        self.chunk = None
        self.missing = 0
        self.without_samples = ()
        self._named: _Shortage | None = None  # when `without_samples` was found
        self._has_said_who_stands_in = False
        self._joined_loaders: list[JoinedLoader] = []

    @property
    def samples(self) -> float | None:
        """The samples of this rank that count, which weigh a loss without a weight; None where its batch tells them."""
        if self.chunk is None:
            return None
        return self.chunk.samples

    @property
    def has_samples(self) -> bool:
        """Whether this rank has samples of the batch in training; else it runs a stand-in."""
        return self.chunk is None or not self.chunk.stand_in

    def prepare_loaders(self, stage: str) -> None:
        """Forget the training loaders that are about to be replaced."""
        if stage == "train":
            self._joined_loaders = []

    def process_dataloader(self, loader: object) -> object:
        """Return the training loader, which ends on all ranks at once. A collective operation.

        Raises:
            ValueError: On all ranks, if `training_step` fetches its own batches, and ranks may have fewer than others.
        """
        joined = join(loader, self.run.world, self.run.device, self.run.loop)
        if isinstance(joined, JoinedLoader):
            if self.fetches_within:
                raise ValueError(
                    "the ranks' train loaders may have different numbers of batches, which a"
                    " training_step(dataloader_iter) learns too late: it fetches its own. Let training_step take"
                    " (batch, batch_idx), or give all ranks a loader of the same length."
                )
            self._joined_loaders.append(joined)
            self.joins = True
        return joined

    @property
    def fetches_within(self) -> bool:
        """Whether `training_step` fetches its own batches, as Lightning has it if it takes a `dataloader_iter`."""
        return is_param_in_hook_signature(self.run.module.training_step, "dataloader_iter", explicit=True)

    @property
    def draws_order(self) -> bool:
        """Whether the ranks share a loader that may draw its order from the random numbers of the process."""
        return False

    def drawing_order(self) -> AbstractContextManager[None]:
        """Return the context in which evaluation loaders draw the seeds of their workers."""
        return nullcontext()

    def as_evaluated(self, loader: object) -> object:
        """Return an evaluation loader of the run, if nothing else is to be done with it."""
        return loader

    def transferring(self, batch: object) -> AbstractContextManager[None]:
        """Return the context in which a batch is moved to the device."""
        return nullcontext()

    def on_train_batch_start(self) -> None:
        """Find the record of the batch that arrives."""
        self._arrive(self.run.loop.epoch, self.run.loop.batch_number)

    def _arrive(self, epoch: object, number: int) -> None:
        """Begin to train on a batch of this number in an epoch."""
        world_size = self.run.world.size
        fetched: list[FetchRecord] = []
        for loader in self._joined_loaders:
            record = loader.arrive(epoch, number)
            if record is not None:
                fetched.append(record)
        self.missing = 0
        self.chunk = None
        for record in fetched:
            ranks_with_batch, _ = record.counts.read()
            self.missing = max(self.missing, world_size - ranks_with_batch)
            if not record.has_batch:
                self.chunk = STAND_IN
        loaders = len(self.run.loop.iterators)
        if self.missing > 0 and loaders > 1:
            raise RuntimeError(
                f"one of the {loaders} train loaders has no more batches on {self.missing} of {world_size} ranks: no"
                " weight of the step can count one loader and not the other. Give all ranks the same number of batches,"
                " or read them by one loader."
            )
        self._find_ranks_without_samples()

    def _find_ranks_without_samples(self) -> None:
        """Find which ranks have no samples. A collective operation when their number changes, or the epoch.

        In the rest of an epoch it need not be repeated: a rank that has no batch left gets none.
        """
        shortage = _Shortage(self.run.trainer.current_epoch, self.missing)
        if shortage == self._named:
            return
        self._named = shortage
        if self.missing == 0:
            self.without_samples = ()
            return
        of_ranks = self.run.world.gather_integers([self.has_samples])
        self.without_samples = [rank for rank, (has_samples,) in enumerate(of_ranks) if not has_samples]
        self._say_who_stands_in()

    def _say_who_stands_in(self) -> None:
        """Say once per run which ranks compute samples that do not count, as the user's own code sees them."""
        if not self.without_samples or self._has_said_who_stands_in:
            return
        self._has_said_who_stands_in = True
        rank_zero_info(f"GradAvgStrategy: {_about_stand_ins(self.without_samples, 'in a step')}")

    def training_step(self) -> AbstractContextManager[None]:
        """Return the context of a training step, in which a stand-in leaves no trace."""
        if self.has_samples:
            return nullcontext()
        return stand_in(self.run.module)

    def pieces(self, batch: Any) -> list[PieceOfBatch]:
        """Return the pieces of this rank's batch in training, in the order in which they are computed."""
        samples = 1 if self.has_samples else 0
        return [PieceOfBatch(0, samples, batch)]

    def computing(self, what: str, piece: PieceOfBatch) -> AbstractContextManager[None]:
        """Return the context in which a piece of the batch in training is computed, from the stream of that piece.

        Args:
            what: What is done, such as "forward"; each has a stream of its own.
            piece: The piece.
        """
        return nullcontext()

    def make_forward(self, piece: PieceOfBatch, world: World | None) -> Forward:
        """Return the `Forward` of a piece; the ranks of `world` exchange within it."""
        return Forward(self.samples, self.without_samples, world, in_backward=self._in_backward(piece))

    def _in_backward(self, piece: PieceOfBatch) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes the context in which the backward of a piece runs."""
        if self.has_samples:
            return nullcontext
        # Activation checkpointing runs parts of the stand-in's forward again, which write buffers.
        return partial(buffers_kept, self.run.module)

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save that there are no loaders to resume."""
        saved["data"] = None


class SplitBatches(Batches):
    """Splits the training loaders of a run, and has each piece of a batch draw from its own stream.

    The calls come in this order: `load`, in a resumed run; `configure_ddp`; for each time that Lightning prepares the
    training loaders, `prepare_loaders` and `process_dataloader` for each; `on_train_start`; then for each batch

    1. Lightning reads it, and calls the hook before the transfer, in whose place is `_before_transfer`;
    2. the strategy moves it to the device within `transferring`; several pieces stay where they are;
    3. `on_train_batch_start`;
    4. `pieces`, and for each of them `moved` and `computing`.
    """

    def __init__(self, options: Options, to_device: Callable[[Any], Any], own_state: Callable[[], RandomState]) -> None:
        """Split the batches of a strategy.

        Args:
            options: The strategy's options.
            to_device: Moves a batch with the user's hooks.
            own_state: Returns the own random state of the process, also where evaluation draws from its streams.
        """
        self._options = options
        self._own_state = own_state
        self._to_device = to_device
        self._user_injects_samplers: bool | None = None  # the Trainer's option; None of a run that does not train
        self._loaded: DataState | None = None  # of a checkpoint, until a batch is trained on
        self._loaders: list[TrainingLoader] = []
        self._progress: Progress | None = None  # once the first training loader is processed
        self._replaced = ExitStack()  # the module's hook before the transfer

    def setup(self, run: Run) -> None:
        """Forget an earlier run, but keep the state of a checkpoint: `load` may come before."""
        super().setup(run)
        self._loaders = []
        self._progress = None

    def configure_ddp(self, run: Run) -> None:
        """Begin to split the loaders of a run that trains."""
        super().configure_ddp(run)
        if self.fetches_within:
            raise ValueError(
                "split_batches=True cannot serve a training_step(dataloader_iter): it fetches its own batches."
                " Let training_step take (batch, batch_idx), or set split_batches=False."
            )
        self._split = Split(
            run.world.rank,
            run.world.size,
            replicas=self._options.shaping_replicas(run.world.size),
            max_samples=self._options.max_device_batch_size,
        )
        self._user_injects_samplers = injects_samplers(run.trainer)
        # Hooks that are not the user's draw nothing, and the states of generators need not be read around them.
        self._hooks_before_transfer = _has_hooks(run, "on_before_batch_transfer")
        self._hooks_of_transfer = _has_hooks(run, "transfer_batch_to_device", "on_after_batch_transfer")
        # Lightning calls the hook of the data module if it has one, and else that of the module. It warns of a module
        # with a hook beside a data module, so the data module's stands for both where neither is the user's.
        name = "on_before_batch_transfer"
        owner: Any = run.module
        datamodule = getattr(run.trainer, "datamodule", None)
        if datamodule is not None and (is_overridden(name, datamodule) or not is_overridden(name, run.module)):
            owner = datamodule
        self._user_hook = owner.on_before_batch_transfer
        self._replaced.enter_context(replaced(owner, name, method_of(owner, name, self._before_transfer)))

    def prepare_loaders(self, stage: str) -> None:
        """Turn off sampler injection while Lightning prepares the training loaders, and on again for others.

        This is the only call that knows which loaders come next.
        """
        if stage == "train":
            self._loaders = []
        if self._user_injects_samplers is not None:
            injects = self._user_injects_samplers and stage != "train"
            set_injection_of_samplers(self.run.trainer, injects)

    def process_dataloader(self, loader: object) -> TrainingLoader:
        """Return a training loader of this rank's parts of the batches. A collective operation."""
        if self._progress is None:
            self._progress = self._begin_progress()
        position = len(self._loaders)
        split = TrainingLoader(loader, self._split, self.run.world, self._progress, position=position)
        if self._loaded is not None and position < len(self._loaded["loaders"]):
            split.load_state_dict(self._loaded["loaders"][position])
        self._loaders.append(split)
        rank_zero_info(f"GradAvgStrategy: {split.describe()}")
        return split

    def _begin_progress(self) -> Progress:
        """Return the progress of a run, once for all its loaders. A collective operation."""
        world = self.run.world
        resumed_order = None
        if self._loaded is not None:
            seed = self._loaded["seed"]
            resumed_order = self._loaded["order"]
        else:
            seed = run_seed(world)
        watch = Watch(
            # The run to reproduce collates whole batches. One rank says so for all.
            compares_parts=self._options.preset is not None and self._split.cuts and world.rank == 0,
            requires_streams=self._options.reproducible,
        )
        return Progress(self.run.loop, seed, resumed_order, watch, world, self._own_state)

    @property
    def progress(self) -> Progress:
        """How far the run is, once its first training loader is processed."""
        assert self._progress is not None, "no training loader is processed yet"
        return self._progress

    @property
    def seed(self) -> int | None:
        """The seed of all keyed streams; None before the first training loader is processed."""
        return None if self._progress is None else self._progress.seed

    def drawing_order(self) -> AbstractContextManager[None]:
        """Return the context in which evaluation loaders draw the seeds of their workers: from the order's stream.

        One stock process draws them, and the order of training, from one state.
        """
        trainer = self.run.trainer
        stage = trainer.state.stage
        evaluates = stage is not None and stage.evaluating  # else a user looks at the data, perhaps on one rank
        # Lightning restores the state of the process after the sanity check (`isolate_rng`). The order's stream has
        # begun before it if a hook asks for `estimated_stepping_batches`, as a warm-up does.
        if trainer.sanity_checking or not evaluates or self._progress is None or not self._progress.has_order:
            return nullcontext()
        return self._progress.order.drawing()

    def as_evaluated(self, loader: object) -> object:
        """Return an evaluation loader of the run that draws the seed of its workers from the order's stream."""
        return SeededByOrder(user_loader(loader), self.drawing_order)

    def on_train_start(self) -> None:
        """Begin training, with the loaders set up and the progress of a checkpoint restored.

        Raises:
            ValueError: If the checkpoint is of the middle of an epoch of several loaders.
        """
        if self._loaded is None:
            return
        # Not before: Lightning makes and drops iterators of loaders, which draw. In the run that goes on, nothing does.
        restore_random_state(self._loaded["own"])
        states = self._loaded["loaders"]
        within_epoch = [state["batches"] for state in states if state["order"] is not None]
        # A checkpoint in the first window of an epoch counts no batch: the epoch begins anew, with all its loaders.
        if any(within_epoch) and max(len(states), len(self._loaders)) > 1:
            raise ValueError(
                f"the checkpoint was saved within an epoch, after {max(within_epoch)} batches of one of"
                f" {len(states)} train loaders, and this run has {len(self._loaders)}: with several, training resumes"
                " only from the end of an epoch. Resume from a checkpoint that was saved there, or read the data by one"
                " loader."
            )
        loop = self.run.loop
        loop.leave_ended_epoch()
        batch = loop.processed
        if within_epoch:
            batch = within_epoch[0]
        loop.restart_at(batch)

    def _fetched(self, number: int) -> list[Fetched | None]:
        """Return what is known of the batch of a number in this epoch, of each loader; None where it has no more."""
        epoch = self.run.loop.epoch
        return [loader.records.get(epoch, number) for loader in self._loaders]

    def _before_transfer(self, batch: object, dataloader_idx: int = 0) -> object:
        """Stand for the module's hook before a batch is moved. Of several pieces, `moved` calls it for each."""
        if not self.run.trainer.training:
            return self._user_hook(batch, dataloader_idx)
        fetched = self._fetched(self.run.loop.ready)
        if any(of_loader is not None for of_loader in fetched):
            self.progress.begin_transfer(fetched)
        pieces = self._pieces_of_loaders(batch)
        if pieces is not None:
            return pieces
        with self._before_transferring(self._arriving_piece(0), self.run.loop.total_ready):
            return self._user_hook(batch, dataloader_idx)

    def _pieces_of_loaders(self, batch: object) -> Pieces | None:
        """Return the pieces of a batch, each in the structure of the loaders; None if the batch is one piece."""
        fetched = [of_loader for of_loader in self._fetched(self.run.loop.ready) if of_loader is not None]
        chunks = [of_loader.read.record.chunk for of_loader in fetched]
        if all(len(chunk.pieces) == 1 for chunk in chunks):
            return None
        if not any(_are_pieces(leaf) for _, leaf in leaves(batch, is_leaf=_are_pieces)):
            return None  # a user has another batch moved
        _require_same_layout(chunks)
        pieces = Pieces()
        for index in range(len(chunks[0].pieces)):
            pieces.append(mapped(batch, partial(_piece_of, index), is_leaf=_are_pieces))
        return pieces

    def transferring(self, batch: object) -> AbstractContextManager[None]:
        """Return the context in which Lightning has a batch moved, and with it the user's hooks."""
        if not self.run.trainer.training:
            return nullcontext()
        return self._transferring(self._arriving_piece(0), self.run.loop.total_ready)

    def _arriving_piece(self, index: int) -> Piece | None:
        """Return a piece of the batch that Lightning moves; None if a user has another one moved."""
        for of_loader in self._fetched(self.run.loop.ready):
            if of_loader is not None:
                return of_loader.read.record.chunk.pieces[index]
        return None

    def _before_transferring(self, piece: Piece | None, step: int) -> AbstractContextManager[None]:
        if piece is None or not self._hooks_before_transfer:
            return nullcontext()
        return drawing_from(self._key("before the transfer", piece, step), self.run.device)

    def _transferring(self, piece: Piece | None, step: int) -> AbstractContextManager[None]:
        if piece is None or not self._hooks_of_transfer:
            return nullcontext()
        return drawing_from(self._key("transfer", piece, step), self.run.device)

    def _key(self, what: str, piece: Piece, step: int) -> bytes | None:
        """Return the key of the stream of a piece; None where nothing is cut.

        Args:
            what: What is done with it.
            piece: The piece.
            step: The number of its batch in the run. Lightning counts a batch once it has reached training: the number
                is `total_ready` while it is moved, and `total_ready - 1` in its step.
        """
        if not self._split.cuts:
            return None
        if piece.number is None:
            return stream_key(self.progress.seed, f"{what} of a stand-in", step, self._split.rank)
        return stream_key(self.progress.seed, what, step, piece.number)

    def _arrive(self, epoch: object, number: int) -> None:
        fetched = self._fetched(number)
        arrived = [of_loader for of_loader in fetched if of_loader is not None]
        chunks = [of_loader.read.record.chunk for of_loader in arrived]
        _require_same_layout(chunks)
        for of_loader in arrived:
            compare_at_times(of_loader.read)
            probed = of_loader.read.probed
            if probed is not None and probed.difference:
                rank_zero_info(_DEPENDS_ON_BATCH.format(probed.difference))
        self.chunk = chunks[0]
        has_no_common_number = self.chunk.samples is None or self._differ_in_proportion(chunks)
        if has_no_common_number and not self.chunk.stand_in:
            # No loader's samples weigh a loss over several.
            self.chunk = self.chunk._replace(samples=None)
        self.without_samples = [rank for rank, pieces in enumerate(self.chunk.layout) if pieces == 0]
        self._say_who_stands_in()
        self.progress.arrive(number, self._loaders, fetched)
        self._loaded = None

    def _differ_in_proportion(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether the ranks' parts of several loaders' batches may differ in proportion.

        They don't if the batches are of one size, or if each is cut evenly: 8 and 4 samples on 4 ranks are 2 and 1 on
        each.
        """
        sizes = {chunk.batch_samples for chunk in chunks}
        if len(sizes) == 1:
            return False
        return any(size % self._split.chunks != 0 for size in sizes)

    def pieces(self, batch: Any) -> list[PieceOfBatch]:
        """Return the pieces of this rank's batch in training, in the order in which they are computed."""
        chunk = self.chunk
        assert chunk is not None, "pieces() needs a batch that is in training"
        batches = batch if isinstance(batch, Pieces) else [batch]
        found: list[PieceOfBatch] = []
        for index, (piece, of_piece) in enumerate(zip(chunk.pieces, batches, strict=True)):
            found.append(PieceOfBatch(index, piece.samples, of_piece))
        return found

    def moved(self, piece: PieceOfBatch) -> object:
        """Return the batch of one of several pieces on the device, moved by the user's hooks.

        Not before it is computed: the device holds one piece at a time.
        """
        assert self.chunk is not None
        of_chunk = self.chunk.pieces[piece.place]
        step = self.run.loop.total_ready - 1
        with self._before_transferring(of_chunk, step):
            batch = self._user_hook(piece.batch, 0)
        with self._transferring(of_chunk, step):
            return self._to_device(batch)

    def computing(self, what: str, piece: PieceOfBatch) -> AbstractContextManager[None]:
        """Return the context in which a piece of the batch in training is computed, from the stream of that piece."""
        assert self.chunk is not None
        step = self.run.loop.total_ready - 1
        return drawing_from(self._key(what, self.chunk.pieces[piece.place], step), self.run.device)

    def _in_backward(self, piece: PieceOfBatch) -> Callable[[], AbstractContextManager[None]]:
        # In manual optimization it runs within `training_step`, perhaps several times, and draws from its stream.
        if not self.run.module.automatic_optimization:
            return nullcontext
        return partial(self.computing, "backward", piece)

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save where training stands in its data.

        What Lightning saves of our loaders is dropped: it would load it only within an epoch, and raise if the resumed
        run has another number of loaders.
        """
        checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)
        if self._loaded is not None:
            saved["data"] = self._loaded
        elif self._progress is None or not self._progress.has_order:
            saved["data"] = None
        else:
            saved["data"] = DataState(
                seed=self._progress.seed,
                order=self._progress.order.state,
                own=self._progress.own_state(),
                loaders=[loader.state_dict() for loader in self._loaders],
            )

    @property
    def draws_order(self) -> bool:
        """Whether the ranks share a loader that may draw its order from the random numbers of the process."""
        return any(draws_order(loader.loader) for loader in self._loaders)

    def describe(self) -> str:
        """Return the start line's sentence about ranks that will have no samples in the last batch of an epoch."""
        for loader in self._loaders:
            size = last_batch_size(loader.loader)
            if size is None:
                continue
            ranks = [rank for rank, pieces in enumerate(self._split.cut(size).layout) if pieces == 0]
            if ranks:
                self._has_said_who_stands_in = True
                about = _about_stand_ins(ranks, "in the last batch of an epoch")
                return f"{about[0].upper()}{about[1:]}."
        return ""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Keep the state of a checkpoint for the next run."""
        self._loaded = saved.get("data")  # none of a run without `split_batches`

    def teardown(self) -> None:
        """Restore what was replaced."""
        self._loaded = None
        self._replaced.close()
        if self._user_injects_samplers is not None:
            set_injection_of_samplers(self.run.trainer, self._user_injects_samplers)
            self._user_injects_samplers = None


_DEPENDS_ON_BATCH = (
    "GradAvgStrategy: collate_fn makes something else of a whole batch than of its parts, found in {}. Every rank"
    " collates its own samples, so what depends on the other samples of the batch (padding that counts in the loss,"
    " targets centred by the batch, mixed samples) is not that of one process. If your loss masks the padding, nothing"
    " is wrong. If not, mask it, or pad to a fixed length; compute what needs the batch in training_step, with gather"
    " or global_mean."
)


def _about_stand_ins(ranks: Sequence[int], when: str) -> str:
    verb = "has" if len(ranks) == 1 else "have"
    return (
        f"{listed_ranks(ranks)} {verb} no samples {when}: training_step runs there on samples that do not count, which"
        " collectives and lists of your own see (ask strategy.has_samples)"
    )


class SeededByOrder(LoaderWrapper):
    """An evaluation loader that draws the seed of its workers from the order's stream, and the rest as it does."""

    def __init__(self, loader: object, drawing: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(loader, shared=False)
        self._drawing = drawing

    def __iter__(self) -> Iterator[Any]:
        with self._drawing():
            return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def _are_pieces(part: object) -> bool:
    """Return whether a part of what Lightning's loader yields is what one split loader yields, in several pieces."""
    return isinstance(part, Pieces)


def _piece_of(index: int, part: object) -> object:
    """Return the piece of this number of what one loader yields: None, where it has no more."""
    if isinstance(part, Pieces):
        return part[index]
    return part


def _has_hooks(run: Run, *names: str) -> bool:
    """Return whether the module or its data module has one of these hooks of its own."""
    owners: list[object] = [run.module]
    datamodule = getattr(run.trainer, "datamodule", None)
    if datamodule is not None:
        owners.append(datamodule)
    return any(is_overridden(name, owner) for name in names for owner in owners)


def _require_same_layout(chunks: Sequence[Chunk]) -> None:
    """Raise on all ranks unless several loaders' batches are cut into the same pieces: each piece has one weight."""
    if len({chunk.layout for chunk in chunks}) == 1:
        return
    sizes = []
    for chunk in chunks:
        pieces = " + ".join(str(count) for count in chunk.layout)
        sizes.append(f"{plural(chunk.batch_samples, 'sample')} in {pieces} pieces")
    raise RuntimeError(
        f"the batches of the train loaders, now {' and '.join(sizes)} on the ranks, are not cut alike, so some piece"
        " has samples of one loader and none of another. Set drop_last=True, or use equal batch sizes."
    )
