"""`diffcache list` shows every registered policy."""

from diffcache.registry import get_policy, policies


def test_the_table_names_every_policy(diffcache):
    ran = diffcache("list")
    assert ran.code == 0
    assert all(name in ran.out for name in policies())


def test_json_tells_what_a_policy_is_made_of(diffcache):
    entries = {entry["name"]: entry for entry in diffcache("list", "--json").json()}
    assert set(entries) == set(policies())
    for name, entry in entries.items():
        policy = get_policy(name)
        assert entry["composition"] == policy.describe()
        assert entry["exact"] == dict(policy.exact)
        assert entry["settings"].keys() == policy.settings().keys()
        assert entry["source"]
    presets = {name for name, entry in entries.items() if entry["preset"]}
    assert presets == {"exact", "quality", "balanced", "fast"}
