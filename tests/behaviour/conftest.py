"""As in a pipeline call gradients are off; what a run did not skip is said in its report."""

from __future__ import annotations

import warnings

import pytest
import torch

import diffcache


@pytest.fixture(autouse=True)
def as_in_a_pipeline_call():
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", diffcache.DiffcacheWarning)
        yield
