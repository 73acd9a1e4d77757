"""Marks of the settings: whether a setting changes the result, and what may differ because it does not."""

from enum import Enum


class Mark(Enum):
    """What a setting is for: metadata of its field, `Annotated[int, Mark.RESULT]`.

    Every field of `RunConfig` has exactly one of the first four. That of a section holds for all settings in it.
    """

    RESULT = "determines the result, and stays as it is at a resume"
    EXECUTION = "determines how a run is executed, and may change at a resume"
    VALIDATION = "may change at a resume, unless the validations decide when the run ends (stop_early.patience)"
    MACHINE = "may change at a resume, and differ between the machines of a run"
    TRAINING = "has no effect on a trained model"


# Recipes, also those of users, give these names to settings of the section `data`. They are known by name, because a
# run folder must be read without importing its recipe: that would run code of a stranger.
DATA_MARKS = {
    "root": Mark.MACHINE,
    "cache": Mark.MACHINE,
    "cache_gb": Mark.EXECUTION,
    "eval_sets": Mark.VALIDATION,  # one setting per set below it
}
