from __future__ import annotations

import pytest
from fake_report import NOISE, Rollouts, fake_report, fake_worst

from trueup.evidence.trace import TokenTrace
from trueup.gap import GapReport
from trueup.report import render_html


@pytest.fixture(scope="session")
def rollouts() -> Rollouts:
    return Rollouts()


@pytest.fixture(scope="session")
def report(rollouts: Rollouts) -> GapReport:
    return fake_report(rollouts)


@pytest.fixture(scope="session")
def worst(rollouts: Rollouts) -> TokenTrace:
    return fake_worst(rollouts)


@pytest.fixture(scope="session")
def page(report: GapReport, worst: TokenTrace) -> str:
    return render_html(report, NOISE, worst, title="Step 120")
