"""`mkb doctor` looks at everything and fails only for what nothing works without."""

import json

from typer.testing import CliRunner

from metakernelbench.cli.doctor import app


def test_doctor_looks_at_everything_and_says_what_it_found():
    done = CliRunner().invoke(app, ["--json"])
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert {"Python", "PyTorch", "GPU", "TIRx", "CuTe DSL", "Triton", "isolation of gradings"} <= set(findings)
    assert all(finding["detail"] for finding in findings.values())
    missing = [f for f in findings.values() if f["needed"] and f["state"] == "missing"]
    assert done.exit_code == (1 if missing else 0)
