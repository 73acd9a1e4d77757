"""The verdict on a recipe, from the outcomes of its trials."""

import pytest

from samebits.check.judge import Outcome, judge
from samebits.check.trial import Trial
from samebits.errors import ConfigError


def test_a_recipe_that_fails_in_one_process_is_reported_as_that_and_not_as_a_difference() -> None:
    error = ConfigError("the recipe raised TypeError: batch() got an unexpected argument", fix="Correct the recipe.")
    outcomes = [Outcome(Trial("1 process"), None, error), Outcome(Trial("2 processes", procs=2), None, error)]
    with pytest.raises(ConfigError, match="the recipe raised TypeError"):
        judge({"checks": {}, "state": [], "sources": []}, outcomes)
