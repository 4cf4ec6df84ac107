"""The arithmetic of the part `warm_start`. Its trainings take minutes."""

from benchmarks.warm_start import Start, figures, samples


def test_each_warm_start_is_compared_with_the_cold_one_before_it() -> None:
    cold, warm = [Start(100.0, 80.0, 9), Start(300.0, 90.0, 11)], [Start(20.0, 20.0, 1), Start(90.0, 18.0, 1)]
    found = {figure.name: figure for figure in figures(cold, warm)}
    wall, processor = "time to the first planned iteration", "processor time"
    assert found[f"{wall}, cold"].value == 200.0 and found[f"{wall}, warm"].value == 55.0
    assert found[f"{wall}, warm / cold"].value == (0.2 + 0.3) / 2 and found[f"{wall}, warm / cold"].met
    assert found[f"{processor}, warm / cold"].value == (0.25 + 0.2) / 2
    assert found["iterations before it, cold"].value == 10 and found["iterations before it, warm"].met
    assert samples(cold, warm)["seconds, cold"] == [100.0, 300.0]
