"""Records of a run: each step once, in TensorBoard too, and what they say of a device."""

import ctypes
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer import event_file_writer

from samebits.errors import CheckpointError
from samebits.report.records import FILE_NAME, MetricsLog, read_records
from samebits.report.speed import DeviceUse, nvml_reader
from samebits.report.trackers.process import values_of


def _write(folder: Path, steps: range, *, tensorboard: bool = False) -> None:
    records = MetricsLog(folder, tensorboard=tensorboard)
    for step in steps:
        records.write("step", step, 1, {"loss": 1 / step})
    records.close()


def test_a_record_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    records = MetricsLog(tmp_path / "run", tensorboard=False)
    records.write("eval", 23, 1, {"top1": 0.5, "loss": math.nan})
    assert json.loads((tmp_path / "run" / FILE_NAME).read_text()) == {
        "kind": "eval", "step": 23, "epoch": 1, "top1": 0.5, "loss": None,
    }  # fmt: skip
    records.close()


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    _write(tmp_path, range(1, 10))
    records = MetricsLog(tmp_path, tensorboard=False)
    records.truncate_after(6)
    for step in range(7, 13):
        records.write("step", step, 2, {"loss": 0.0})
    records.close()
    assert [record["step"] for record in read_records(tmp_path, "step")] == list(range(1, 13))


def test_a_line_that_a_crash_cut_off_is_dropped(tmp_path: Path) -> None:
    _write(tmp_path, range(1, 5))
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-9])
    assert [record["step"] for record in read_records(tmp_path)] == [1, 2, 3]
    records = MetricsLog(tmp_path, tensorboard=False)
    records.truncate_after(100)
    records.write("step", 4, 1, {})
    records.close()
    assert [record["step"] for record in read_records(tmp_path)] == [1, 2, 3, 4]


def test_a_run_without_records_has_nothing_to_take_away(tmp_path: Path) -> None:
    MetricsLog(tmp_path).truncate_after(5)
    assert read_records(tmp_path) == []


def test_records_of_one_kind_can_be_picked(tmp_path: Path) -> None:
    records = MetricsLog(tmp_path, tensorboard=False)
    records.write("step", 1, 1, {"loss": 2.0})
    records.write("eval", 1, 1, {"top1": 0.5})
    records.close()
    assert [record["kind"] for record in read_records(tmp_path, "eval")] == ["eval"]


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts TensorBoard's files from 0, as a run's process does: of one second, the tenth is read before the ninth."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.mark.usefixtures("own_process")
def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    _write(tmp_path, range(1, 10), tensorboard=True)
    records = MetricsLog(tmp_path)
    records.truncate_after(6)
    for step in range(7, 9):
        records.write("step", step, 2, {"loss": 0.0})
    records.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("step/loss")] == list(range(1, 9))


def test_without_tensorboard_there_is_no_folder_for_it(tmp_path: Path) -> None:
    _write(tmp_path, range(1, 3))
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.usefixtures("own_process")
def test_a_run_that_goes_back_has_each_step_once_too(tmp_path: Path) -> None:
    records = MetricsLog(tmp_path)
    for last, first in ((9, 1), (12, 7)):
        records.truncate_after(first - 1)
        for step in range(first, last + 1):
            records.write("step", step, 1, {"loss": 1 / step})
    records.close()
    assert [record["step"] for record in read_records(tmp_path, "step")] == list(range(1, 13))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("step/loss")] == list(range(1, 13))


def test_an_evaluation_that_will_be_done_again_is_taken_away_and_its_step_stays(tmp_path: Path) -> None:
    records = MetricsLog(tmp_path, tensorboard=False)
    for kind in ("step", "eval"):
        records.write(kind, 4, 1, {})
    records.truncate_after(4, last_eval=2)
    assert [record["kind"] for record in read_records(tmp_path)] == ["step"]


@pytest.mark.parametrize("name", [FILE_NAME, "tensorboard"])
def test_a_place_that_can_not_be_written_is_named(tmp_path: Path, name: str) -> None:
    if name == FILE_NAME:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("")
    records = MetricsLog(tmp_path)
    with pytest.raises(CheckpointError, match=f"can't write {tmp_path / name}: "):
        records.write("step", 1, 1, {"loss": 1.0})
    records.close()


def test_a_disk_without_room_is_a_checkpoint_error() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")
    records = MetricsLog(full.parent, tensorboard=False)
    records._path = full
    with pytest.raises(CheckpointError, match="can't write /dev/full: No space left on device"):
        records.write("step", 1, 1, {"loss": 1.0})
    with pytest.raises(CheckpointError, match="No space left on device"):
        records.close()
    records.close()


def test_tensorboard_shows_the_pictures_of_a_folder_under_their_names(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (6, 4), (255, 0, 0)).save(tmp_path / "pictures/people.png")
    Image.new("L", (5, 5)).save(tmp_path / "pictures/confusion.png")
    records = MetricsLog(tmp_path, tensorboard=True)
    records.show(tmp_path / "pictures", 40)
    records.close()
    MetricsLog(tmp_path, tensorboard=False).show(tmp_path / "pictures", 41)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["images"]) == ["confusion", "people"]
    (shown,) = events.Images("people")
    assert (shown.step, shown.width, shown.height) == (40, 6, 4)


def test_pictures_that_did_not_change_are_not_shown_again(tmp_path: Path) -> None:
    Image.new("L", (5, 5)).save(tmp_path / "old.png")
    records = MetricsLog(tmp_path)
    records.show(tmp_path, 1)
    Image.new("L", (5, 5)).save(tmp_path / "new.png")
    records.show(tmp_path, 2)
    records.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {name: [image.step for image in events.Images(name)] for name in ("old", "new")} == {"old": [1], "new": [2]}


def test_tensorboard_has_the_hyperparameters_and_which_metrics_belong_to_them(tmp_path: Path) -> None:
    records = MetricsLog(tmp_path)
    settings = {"optim.lr": 0.2, "epochs": 3, "loader.workers": None, "optim.betas": [0.9, 0.99], "ema": True}
    for step in (5, 10):
        records.write("eval", step, step / 5, {"top1": step / 10})
        records.describe(settings, ["top1"])
    records.close()
    # In the run's own folder: another folder would be a second run in TensorBoard.
    assert not [path for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = events.PluginTagToContent("hparams")
    experiment = HParamsPluginData.FromString(found["_hparams_/experiment"]).experiment
    assert [info.name.tag for info in experiment.metric_infos] == ["eval/top1"]
    start = HParamsPluginData.FromString(found["_hparams_/session_start_info"]).session_start_info
    assert start.hparams["optim.lr"].number_value == 0.2
    assert start.hparams["epochs"].number_value == 3
    assert start.hparams["ema"].string_value == "true"
    assert start.hparams["optim.betas"].string_value == "[0.9, 0.99]"
    assert [event.value for event in events.Scalars("eval/top1")] == pytest.approx([0.5, 1.0])


UUID = "1b5a2bc0-0000-4a7e-8c1c-2d3e4f5a6b7c"


class Driver:
    """Answers as libnvidia-ml does, into the caller's memory."""

    def __init__(self, *, busy: int = 87, code: int = 0) -> None:
        self.busy, self.code = busy, code
        self.asked: list[bytes] = []

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: ctypes.c_char_p, handle: Any) -> int:
        self.asked.append(uuid.value or b"")
        handle._obj.value = 42
        return 0 if self.asked[-1] == f"GPU-{UUID}".encode() else 6

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, found: Any) -> int:
        assert handle.value == 42
        found._obj.gpu = self.busy
        return self.code


def test_the_driver_is_asked_for_the_gpu_of_the_process() -> None:
    driver = Driver()
    read = nvml_reader(UUID, driver)
    assert read() == 0.87
    driver.busy = 0
    assert read() == 0.0
    assert driver.asked == [f"GPU-{UUID}".encode()]
    driver.code = 3  # NVML_ERROR_NOT_SUPPORTED
    assert read() is None
    assert nvml_reader("another", driver)() is None
    assert nvml_reader(UUID, object())() is None  # a library without these functions
    if not torch.cuda.is_available():
        assert nvml_reader(UUID)() is None


def test_the_cpu_has_memory_and_no_gpu() -> None:
    values = DeviceUse(torch.device("cpu")).values()
    assert values["gpu_use"] is None
    assert 0.01 < (values["memory_gb"] or 0) < 100


def test_values_that_are_not_known_are_null_in_records_and_left_out_in_trackers(tmp_path: Path) -> None:
    records = MetricsLog(tmp_path, tensorboard=True)
    records.write("train", 1, 0.1, {"loss": float("nan"), "gpu_use": None, "memory_gb": 0.25})
    records.close()
    (record,) = read_records(tmp_path)
    assert record == {"kind": "train", "step": 1, "epoch": 0.1, "loss": None, "gpu_use": None, "memory_gb": 0.25}
    assert values_of(record).keys() == {"train/loss", "train/memory_gb", "epoch"}
