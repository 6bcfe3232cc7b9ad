"""GluonTS's DeepAR, trained by its own estimator on random windows of waves: `python gluonts_deepar.py 2 result.pt`."""

from __future__ import annotations

import numpy as np
import pandas as pd
from gluonts.dataset.common import ListDataset
from gluonts.torch.model.deepar import DeepAREstimator
from lightning.pytorch import seed_everything
from saved import run_of_arguments, save


def main() -> None:
    run = run_of_arguments()
    seed_everything(0)
    rng = np.random.default_rng(0)
    start = pd.Period("2026-01-01", freq="D")
    series = [{"start": start, "target": np.sin(np.arange(60)) + rng.standard_normal(60) / 10} for _ in range(5)]
    estimator = DeepAREstimator(
        freq="D",
        prediction_length=4,
        context_length=6,
        lags_seq=[1, 2, 7],
        num_layers=1,
        hidden_size=8,
        dropout_rate=0.0,
        # Without it, a sample without observations gets the mean scale of its batch: of the samples of its rank.
        default_scale=1.0,
        batch_size=7,
        num_batches_per_epoch=5,
        trainer_kwargs=run.trainer_options,
    )
    trained = estimator.train_model(ListDataset(series, freq="D"))
    save(trained.trained_net, trained.trainer, run.output)


if __name__ == "__main__":
    main()
