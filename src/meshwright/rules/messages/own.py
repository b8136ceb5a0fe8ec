"""Messages of our own engine that a user may look up, by the file that writes them."""

from __future__ import annotations

from meshwright.rules.messages.message import KnownError, Table

SOURCE = "meshwright/meshwright src/meshwright"
TABLE: Table = {
    f"{SOURCE}/engine/checkpoint/contract.py": {
        "contract fields differ from the checkpoints in the run folder: {} was {} and is {}": "error.contract-differs",
        "resuming with changed contract fields: {}": "error.contract-differs",
    },
    f"{SOURCE}/engine/epochs.py": {
        "train.steps={} with {} each repeat the {} of {} times; fix: {}": "error.data-repeated"
    },
    f"{SOURCE}/engine/post_training/perplexity.py": {
        "the run has no held-out data: it was trained on all of {}": "error.no-held-out-data"
    },
}
OWN_ERRORS: dict[str, KnownError] = {
    "error.contract-differs": KnownError(
        "the run folder has checkpoints of another contract: fields that determine the trained weights, such as data, "
        "batch or optimizer, differ from those it was started with",
        (
            "another --out starts a new run",
            "the values that the message names resume the old one",
            "--accept-changes resumes with the new values, if tensors stay the same: the result is a mixture of both",
        ),
    ),
    "error.data-repeated": KnownError(
        "the run passes over its data more often than is useful: the model memorizes the samples",
        ("train.epochs=3", "fewer train.steps", "more data"),
    ),
    "error.no-held-out-data": KnownError(
        "the loss on training data does not show how good a model is, so some data has to be kept out of the training",
        ("--dataset FILE evaluates on other data", "data.validation_part=0.02 when training holds a part out"),
    ),
}
