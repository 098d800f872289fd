"""What an environment shows of itself: pictures and lines that say what the telemetry says."""

import gc
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from matplotlib.figure import Figure

from swiftcruise.envs.rendering import HEIGHT, WIDTH, Recorder, tiled
from swiftcruise.envs.scenarios.scenario import Scenario
from swiftcruise.envs.simulation import Simulation
from swiftcruise.envs.training_env import TrainingEnv
from swiftcruise.envs.vector_env import TrainingVectorEnv

SCENARIO = "train-001"
EDGE = Scenario.model_validate({"name": "edge", "hardware": "cpu", "workload": {"model": "tiny", "max_length": 256}})
LEAKING = Scenario.model_validate(
    {
        "name": "leaking",
        "hardware": "rtx3090",
        "workload": {"model": "qwen-7b", "max_length": 1024},
        "disturbances": [{"kind": "memory-creep", "rate": 1.0}],
    }
)
CROWDED = Scenario.model_validate(
    {
        "name": "crowded",
        "hardware": "rtx3090",
        "workload": {"model": "qwen-7b", "max_length": 1024, "quantization": "bnb4"},
        "disturbances": [{"kind": "neighbours", "arrival": 1.0, "intervals": 1.0, "memory": [0.05, 0.6]}],
    }
)
RED, BLUE = (0xC1, 0x27, 0x2D), (0x00, 0x72, 0xB2)
TINT = (224, 238, 246)  # the area below a blue line
LEFT, PANEL = 0.085 * WIDTH, (0.925 - 0.085) * WIDTH  # where panels begin, and their width
LARGE, SMALL = np.array([1, 1, 1, 0], dtype=np.float32), np.array([-0.5, -0.2, 1, 0], dtype=np.float32)


def played(actions, scenarios=SCENARIO, render_mode="rgb_array", **options):
    """An environment in which these actions have been taken."""
    env = TrainingEnv(scenarios, render_mode=render_mode, **options)
    env.reset(seed=0)
    for action in actions:
        env.step(action)
    return env


def pixels(picture, colour, rows=slice(None)):
    """Number of pixels of about this colour."""
    return int((np.abs(picture[rows].astype(int) - colour).max(axis=-1) <= 3).sum())


@pytest.mark.parametrize("scenarios", [SCENARIO, EDGE, "test-hard-003"], ids=["gpu", "cpu", "without preview"])
@pytest.mark.parametrize("intervals", [0, 3])
def test_a_picture_has_one_size_whatever_the_device_measures(scenarios, intervals):
    picture = played([SMALL] * intervals, scenarios).render()
    assert picture.shape == (HEIGHT, WIDTH, 3)
    assert picture.dtype == np.uint8
    assert pixels(picture, BLUE) > 100


def test_a_picture_grows_with_the_episode_and_starts_anew_with_the_next():
    env = played([], horizon=9)

    def share_filled():
        """How far the area below the first panel's line reaches."""
        columns = np.flatnonzero((np.abs(env.render()[100:190].astype(int) - TINT).max(axis=-1) <= 2).any(axis=0))
        return (columns.max() - LEFT) / PANEL

    assert share_filled() == pytest.approx(1 / 10, abs=0.01)
    for _ in range(4):
        env.step(SMALL)
    assert share_filled() == pytest.approx(5 / 10, abs=0.01)
    env.reset()
    assert share_filled() == pytest.approx(1 / 10, abs=0.01)


def test_out_of_memory_events_are_marked():
    calm, hit = played([SMALL] * 30), played([LARGE] * 30, CROWDED, guard=False)
    while not hit.telemetry.oom_count[0]:
        hit.step(LARGE)
    top = slice(80, 100)  # above the first panel's lines
    assert pixels(calm.render(), RED, top) == 0
    assert pixels(hit.render(), RED, top) > 20


def test_a_preview_is_drawn_one_interval_ahead():
    """What was announced at the end of an interval stands where the next one will."""
    panel = played([], horizon=3).render()[375:460].astype(int)
    columns = np.flatnonzero((panel[..., 0] - panel[..., 2] > 100).any(axis=0))  # orange
    assert columns.min() == pytest.approx(LEFT + PANEL / 4, abs=3)  # the panel holds four intervals
    assert columns.max() == pytest.approx(LEFT + PANEL / 2, abs=3)


def test_a_line_says_what_the_telemetry_says():
    env = played([SMALL] * 7, render_mode="ansi")
    line, now = env.render(), env.telemetry.plant(0)
    assert "\n" not in line
    for part in (
        "interval   7/120",
        SCENARIO,
        f"{now['tokens_per_s']:,.0f} tokens/s",
        f"memory {now['memory_peak_fraction']:.0%}",
        f"{now['temperature_c']:.0f} °C",
        f"{now['power_w']:.0f} W",
        "0 OOM (0 in all)",
        f"reward {env.simulation.rewards[0]:+.3f}",
    ):
        assert part in line


def test_a_line_leaves_out_what_is_not_measured():
    line = played([SMALL], EDGE, render_mode="ansi").render()
    assert "nan" not in line
    assert "W" not in line
    assert "reward" not in played([], render_mode="ansi").render()  # no decision, no reward


def test_a_line_counts_out_of_memory_events():
    env = played([], CROWDED, guard=False, render_mode="ansi")
    total = env.telemetry.oom_count[0]
    for interval in range(60):
        env.step(LARGE)
        total += env.telemetry.oom_count[0]
        if interval > 20 and env.telemetry.oom_count[0]:
            break
    assert 0 < env.telemetry.oom_count[0] < total
    assert f"{env.telemetry.oom_count[0]:.0f} OOM ({total:.0f} in all)" in env.render()


def test_the_end_of_a_job_is_shown():
    env = TrainingEnv(LEAKING, guard=False, render_mode="ansi")
    env.reset(seed=0)
    terminated = False
    while not terminated:
        assert "ended" not in env.render()
        terminated = env.step(SMALL)[2]
    assert env.render().endswith("ended: out of memory")


def test_pictures_keep_nothing_alive():
    env = played([SMALL] * 3)
    env.render()
    for _ in range(3):
        env.render()
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Figure]


def test_drawing_leaves_pyplot_and_its_backend_alone():
    code = (
        "import sys, swiftcruise.envs.training_env as t\n"
        "assert 'matplotlib' not in sys.modules\n"
        "env = t.TrainingEnv('train-001', render_mode='rgb_array'); env.reset(seed=0); env.render()\n"
        "assert 'matplotlib.figure' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_recorder_without_an_episode_has_nothing_to_show():
    recorder = Recorder()
    assert not recorder.started
    with pytest.raises(RuntimeError, match="before an episode"):
        recorder.picture()


def test_an_interval_is_taken_once():
    simulation = Simulation(1, SCENARIO)
    simulation.reset(np.zeros(1, dtype=np.int64), [5], [0])
    recorder = Recorder()
    recorder.begin(simulation, 0)
    recorder.add(simulation, 0)
    assert "interval   0/120" in recorder.line()
    simulation.step(SMALL[None])
    for _ in range(2):
        recorder.add(simulation, 0)
    assert "interval   1/120" in recorder.line()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_vector_environment_shows_each_training_through_its_resets(mode):
    env = TrainingVectorEnv(3, SCENARIO, horizon=4, render_mode="ansi", autoreset_mode=mode)
    env.reset(seed=0)
    for _ in range(5):
        env.step(np.tile(SMALL, (3, 1)))
    expected = 0 if mode == "NextStep" else 1
    assert [f"interval {expected}/4" in line for line in env.render()] == [True] * 3


def test_a_vector_environment_tiles_its_first_sixteen():
    env = TrainingVectorEnv(3, SCENARIO, render_mode="rgb_array")
    env.reset(seed=0)
    picture = env.render()
    assert picture.shape == (2 * HEIGHT, 2 * WIDTH, 3)
    assert (picture[HEIGHT:, WIDTH:] == 255).all()
    alone = TrainingEnv(SCENARIO, render_mode="rgb_array")
    alone.reset(seed=1)
    assert (picture[:HEIGHT, WIDTH:] == alone.render()).all()


@pytest.mark.parametrize(("count", "rows", "columns"), [(1, 1, 1), (2, 1, 2), (5, 2, 3), (16, 4, 4)])
def test_tiles_stand_in_reading_order(count, rows, columns):
    pictures = [np.full((4, 6, 3), i, dtype=np.uint8) for i in range(count)]
    grid = tiled(pictures)
    assert grid.shape == (4 * rows, 6 * columns, 3)
    order = grid[::4, ::6, 0].ravel()
    assert order.tolist() == [*range(count)] + [255] * (rows * columns - count)


def test_there_must_be_a_picture_to_tile():
    with pytest.raises(ValueError, match="no picture"):
        tiled([])


def test_gymnasium_collects_the_pictures_of_an_episode():
    env = gym.wrappers.RenderCollection(
        gym.make("swiftcruise.envs:SwiftCruise/Training-v0", scenarios=SCENARIO, render_mode="rgb_array")
    )
    env.reset(seed=0)
    env.step(SMALL)
    assert [picture.shape for picture in env.render()] == [(HEIGHT, WIDTH, 3)] * 2
