from depthroute.training import environment
from depthroute.training.environment import describe_environment


def test_a_package_in_no_checkout_has_the_commit_that_it_is_told(monkeypatch):
    monkeypatch.setattr(environment, "_git", lambda *arguments, folder: None)
    monkeypatch.delenv("DEPTHROUTE_COMMIT", raising=False)
    assert describe_environment()["commit"] is None
    monkeypatch.setenv("DEPTHROUTE_COMMIT", "0123abc")
    assert (describe_environment()["commit"], describe_environment()["dirty"]) == ("0123abc", None)


def test_a_checkout_knows_better_than_the_environment(monkeypatch):
    told = {"ls-files": "environment.py", "rev-parse": "4567def", "status": ""}
    monkeypatch.setattr(environment, "_git", lambda *arguments, folder: told[arguments[0]])
    monkeypatch.setenv("DEPTHROUTE_COMMIT", "0123abc")
    assert (describe_environment()["commit"], describe_environment()["dirty"]) == ("4567def", False)
