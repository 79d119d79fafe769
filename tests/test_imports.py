"""``import trueup`` and every meter work without torch."""

from __future__ import annotations

import subprocess
import sys


def test_everything_but_the_engine_works_without_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import trueup, trueup.policy, trueup.report, trueup.cli, trueup.evidence.readers, trueup.examples\n"
        "from trueup.evidence import TokenTrace\n"
        "report = trueup.policy.mismatch(TokenTrace.from_padded([[1]], [[-1.0]], [[-1.0]], [[1]]))\n"
        "assert report['mean_ratio'].value == 1.0\n"
        "try:\n"
        "    import trueup.engines.hf\n"
        "except trueup.errors.MissingExtraError as error:\n"
        "    assert \"pip install 'trueup[hf]'\" in str(error), error\n"
        "else:\n"
        "    raise AssertionError('the engine imported without torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
