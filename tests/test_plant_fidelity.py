"""How true the plant is: the benchmark on the carried tables, and on tables of one's own."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
HEADER = "model,gpu,tuner,lora_targets,batch_size,length,checkpointed,samples_per_s,memory_gib,oom\n"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("plant_fidelity")
    sys.path.remove(str(BENCHMARKS))


def test_the_plant_is_as_true_as_required(benchmark, tmp_path):
    result = benchmark.main(["--quick", "--json", str(tmp_path / "f.json")])
    assert result == json.loads((tmp_path / "f.json").read_text())
    assert result["msswift_speed_mape"] <= 5
    assert result["qwen_speed_mape"] <= 5
    assert result["dec2023_speed_mape"] <= 6
    for dataset in ("msswift", "qwen", "dec2023"):
        assert result[f"{dataset}_memory_mape"] <= 6
    assert result["oom_runs"] == 15
    assert result["oom_recall"] == 1
    assert result["oom_false_alarm_rate"] <= 0.02
    for gpu in ("a40", "v100"):
        assert result[f"zeus_{gpu}_time_mape"] <= 6
        assert result[f"zeus_{gpu}_power_mape"] <= 5


@pytest.mark.parametrize("what", ["speed", "memory"])
def test_refitting_finds_nothing_better_than_the_carried_constants(benchmark, what):
    """Whoever changes the equations has to refit; whoever changes a constant has to say why."""
    rows = [row for row in benchmark.read() if benchmark.ERRORS[what](row, benchmark.Constants()) is not None]
    carried = benchmark.Constants()
    refitted = benchmark.fit(rows, carried, what)
    error = benchmark.ERRORS[what]
    before, after = (benchmark.mape(error(row, constants) for row in rows) for constants in (carried, refitted))
    assert before <= after + 0.3


def table(tmp_path, *lines, header=HEADER):
    path = tmp_path / "mine.csv"
    path.write_text(header + "\n".join(lines) + "\n")
    return ["--measurements", str(path)]


def test_a_table_of_ones_own_is_scored_blind_and_after_one_probe(benchmark, tmp_path):
    """Everything is 30 % slower on this machine than the plant thinks."""
    blind = benchmark.main(
        table(tmp_path, *(f"qwen3-8b,h100,lora,all-linear,{b},{s},1,,," for b in (1, 4) for s in (512, 2048)))
    )
    lines = [
        f"qwen3-8b,h100,lora,all-linear,{b},{s},1,"
        f"{0.7 * row['predicted_samples_per_s']},{row['predicted_memory_gib']},0"
        for (b, s), row in zip([(1, 512), (1, 2048), (4, 512), (4, 2048)], blind["predictions"], strict=True)
    ]
    slow = benchmark.main(table(tmp_path, *lines))
    assert slow["measurements_speed_mape"] == pytest.approx(30, abs=0.1)
    assert slow["measurements_oom_false_alarm_rate"] == 0
    probed = benchmark.main([*table(tmp_path, *lines), "--calibrate-one"])
    assert len(probed["predictions"]) == 3
    assert probed["measurements_speed_mape"] == pytest.approx(0, abs=0.1)
    assert probed["measurements_memory_mape"] == pytest.approx(0, abs=0.1)


def test_a_model_may_be_given_by_its_architecture_and_columns_by_short_names(benchmark, tmp_path):
    named = benchmark.main(table(tmp_path, "qwen3-8b,h100,lora,all-linear,1,2048,1,,,"))
    header = "model,family,L,h,ffn,nh,nkv,hd,V,gpu,tuner,quant,S_fixed,grad_ckpt\n"
    given = benchmark.main(
        table(tmp_path, "mine,recent,36,4096,12288,32,8,128,151936,h100,lora,bf16,2048,1", header=header)
    )
    for name in ("predicted_samples_per_s", "predicted_memory_gib"):
        assert given["predictions"][0][name] == named["predictions"][0][name]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("qwen9,h100,lora,all-linear,1,2048,1,,,", "line 2: unknown model profile 'qwen9'"),
        ("qwen3-8b,h1000,lora,all-linear,1,2048,1,,,", "line 2: unknown hardware profile 'h1000'"),
        ("qwen3-8b,h100,lora,all-linear,1,long,1,,,", "line 2: length must be a number, not 'long'"),
        ("qwen3-8b,h100,lora,all-linear,1,,1,,,", "line 2: a row needs length"),
        ("qwen3-8b,h100,dora,all-linear,1,9,1,,,", "line 2: tuner must be one of"),
        ("qwen3-8b,h100,lora,all-linear,0,9,1,,,", "line 2: batch_size must be at least 1"),
    ],
)
def test_a_bad_row_is_named(benchmark, tmp_path, capsys, line, said):
    with pytest.raises(SystemExit) as end:
        benchmark.main(table(tmp_path, line))
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_predicted_against_measured_is_drawn(benchmark, tmp_path):
    benchmark.draw(benchmark.read(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
