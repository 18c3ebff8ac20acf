"""`diffcache overhead` measures every site; whether the figures are small is for `bench` to say."""


def test_every_site_is_measured(diffcache):
    ran = diffcache("overhead", "--calls", "200", "--json")
    assert ran.code == 0
    timings = ran.json()
    assert {timing["site"] for timing in timings} == {"model", "stack", "block"}
    for timing in timings:
        assert timing["calls"] == 200
        assert 0 < timing["stub"] < timing["microseconds"] < 20_000
        assert timing["reused"] is not None, f"{timing['policy']} reused nothing"
