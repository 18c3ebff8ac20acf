"""`diffcache doctor` finds what is missing and says what to do."""

from importlib.metadata import PackageNotFoundError

import pytest


@pytest.fixture(autouse=True)
def here(monkeypatch, tiny_demo, tmp_path):
    monkeypatch.setattr("diffcache.cli.doctor.demo_model_path", lambda: tiny_demo)
    monkeypatch.chdir(tmp_path)


def statuses(ran):
    return {finding["what"]: finding["status"] for finding in ran.json()["findings"]}


def test_a_whole_installation_is_healthy(diffcache):
    ran = diffcache("doctor", "--json")
    assert ran.code == 0
    assert ran.json()["healthy"]
    assert statuses(ran)["demo model"] == "ok"
    assert "problem" not in statuses(ran).values()
    assert "torch" in diffcache("doctor").out


def test_a_missing_package_has_a_remedy(diffcache, monkeypatch):
    def version(name):
        if name == "accelerate":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("diffcache.cli.doctor.version", version)
    ran = diffcache("doctor", "--json")
    assert ran.code == 1
    assert statuses(ran)["accelerate"] == "problem"
    remedy = next(f["remedy"] for f in ran.json()["findings"] if f["what"] == "accelerate")
    assert "pip install accelerate" in remedy


def test_a_kernels_package_in_the_working_folder_is_a_conflict(diffcache, tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    ran = diffcache("doctor", "--json")
    assert ran.code == 1
    assert statuses(ran)["name clash 'kernels'"] == "problem"


def test_a_demo_model_that_does_not_load_is_a_problem(diffcache, monkeypatch, tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    monkeypatch.setattr("diffcache.cli.doctor.demo_model_path", lambda: tmp_path)
    ran = diffcache("doctor", "--json")
    assert ran.code == 1
    assert statuses(ran)["demo model"] == "problem"
