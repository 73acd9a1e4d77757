"""The settings section `sync`: how often sites average their weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from samebits.config.sections import Decay, Settings


class SyncConfig(Settings):
    """Local steps: sites that train on their own, and average their weights at intervals (docs/long-links.md)."""

    every: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description="Local steps of each site between two averages. 1: gradients are summed in every step. Above 1, a "
        "step of the run is an outer step: so many local steps, then the average.",
    )
    sites: int = Field(
        default=2,
        ge=1,
        le=1024,
        description="Number of sites with weights of their own between two averages. It changes the result; the number "
        "of processes does not. 1: gradients are summed in every step.",
    )
    outer_lr: float = Field(
        default=1.0,
        gt=0,
        description="Learning rate of the outer optimizer, which applies the mean change of the sites. 1 with "
        "outer_momentum=0: the plain average of their weights.",
    )
    outer_momentum: Decay = Field(
        default=0.0, description="Nesterov momentum of the outer optimizer, such as 0.9 as in DiLoCo."
    )
    inner_state: Literal["average", "reset"] = Field(
        default="average",
        description="The sites' optimizer state after an average. average: their mean, which is sent too; reset: none, "
        "which sends a half (sgd with momentum) or a third (adam, adamw) of the bytes.",
    )
