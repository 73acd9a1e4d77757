"""Scripts with the Trainer have equal weights and logs at any number of processes once they use `ExactTrainer`."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.foreign.cases import cases
from tests.foreign.forms import names, script
from tests.foreign.hugging_face_worlds import worlds_of

# Not `importorskip`: all workers would import them, which takes seconds.
pytestmark = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("accelerate")),
    reason="transformers or accelerate is not installed: pip install 'samebits[transformers]'",
)

SCRIPTS = [*names("trainer"), "trainer_lm --lora"]
TOKENS = Path(__file__).with_name("trainer_tokens.py")


def logs(text: str) -> list[dict[str, str]]:
    """The Trainer's logs without times."""
    lines = [ast.literal_eval(line) for line in text.splitlines() if line.startswith("{")]
    return [
        {name: value for name, value in line.items() if "runtime" not in name and "per_second" not in name}
        for line in lines
    ]


def test_a_text_classifier_with_the_trainer_has_equal_weights_and_logs_on_one_and_two_processes(tmp_path: Path) -> None:
    with worlds_of(script("trainer_text", "exact", tmp_path), tmp_path) as worlds:
        (one, text_one), (two, text_two) = worlds.run(1), worlds.run(2)
    assert one is not None
    assert one == two
    assert len(logs(text_one)) > 4
    assert logs(text_one) == logs(text_two)


@pytest.mark.parametrize("name", cases(SCRIPTS))
def test_an_exact_trainer_script_has_one_hash_and_log_also_after_a_kill(name: str, tmp_path: Path) -> None:
    name, *options = name.split()
    with worlds_of(script(name, "exact", tmp_path), tmp_path) as worlds:
        whole, text = worlds.run(1, *options)
        assert whole is not None
        found, other = worlds.run(4, *options)
        assert (found, logs(other)) == (whole, logs(text))
        output = tmp_path / "output"
        checkpoint = output / "checkpoint-3"
        arguments = [*options, "--output_dir", output]
        found, killed = worlds.run(3, *arguments, "--save_steps", 3, kill_when=checkpoint / "samebits.json")
        assert found is None, killed
        found, resumed = worlds.run(2, *arguments, "--resume_from_checkpoint", checkpoint)
        assert found == whole
        assert logs(resumed)[-2] == logs(text)[-2]


# A step has 5 micro-batches, the last one of an epoch 2: 2 ranks and 3 repeat some, each with its own number of tokens.
@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "worlds"),
    [
        ("all tokens count the same", (1, 3)),
        ("the mean of a micro-batch", (1, 2, 3)),
        ("the step", (1, 2)),
        ("inputs that are taken apart", (1, 2)),
    ],
)
def test_tokens_have_one_weight_on_any_number_of_processes(tmp_path: Path, way: str, worlds: tuple[int, ...]) -> None:
    with worlds_of(TOKENS, tmp_path) as started:
        assert len({started.hash(size, way) for size in worlds}) == 1


@pytest.mark.parametrize(
    ("way", "size"),
    [
        ("a counter", 1),
        pytest.param("a counter", 3, marks=pytest.mark.full),
        pytest.param("a counter of the model", 2, marks=pytest.mark.full),
        pytest.param("a value that is kept", 1, marks=pytest.mark.full),
    ],
)
def test_what_a_loss_keeps_is_named(tmp_path: Path, way: str, size: int) -> None:
    with worlds_of(TOKENS, tmp_path) as started:
        ended = started.starter.run_files([TOKENS], size, way, alone=True)
    assert 1 in ended.codes, ended  # the others may be ended by then, as by a launcher
    text = "".join(ended.texts)
    assert "the first micro-batch of a step gives another gradient when it is repeated" in text
    assert "self.state.global_step" in text


@pytest.mark.lab
def test_a_usual_trainer_script_has_other_weights_at_each_number_of_processes(tmp_path: Path) -> None:
    with worlds_of(script("trainer_text", "usual", tmp_path), tmp_path) as worlds:
        assert worlds.hash(1) != worlds.hash(2)
