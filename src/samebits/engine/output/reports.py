"""A run's reports: rank 0 writes console, records and pictures; the other ranks only log."""

import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from samebits.config.schema import RunConfig
from samebits.cores import num_cores
from samebits.data.order import Step
from samebits.engine.job import Job
from samebits.engine.output.recorder import StepRecorder, altered_evaluations
from samebits.engine.progress import StepResult
from samebits.extras import is_installed
from samebits.metrics.early_stop import metric_of
from samebits.metrics.eval_sets import describe_set, metrics_of, with_set
from samebits.report.console import Console
from samebits.report.format import counted
from samebits.report.records import MetricsLog, read_records
from samebits.report.speed import (
    DataWait,
    DeviceUse,
    LossTrend,
    Rate,
    StepProfile,
    Stragglers,
    Work,
    advice,
)
from samebits.report.trackers.start import Trackers
from samebits.storage.background import Background
from samebits.storage.run_folder import RunFolder

# What a run's notices name as the way to better training.


LOGGER = logging.getLogger("samebits")


def warnings_of(metric: Any) -> list[str]:
    """Return the warnings of a recipe's metric about what the model predicts."""
    try:
        return (
            [str(text) for text in metric.warnings()]
            if callable(getattr(metric, "warnings", None))
            else []
        )
    except Exception:  # the metric may be a user's; training continues without its warnings
        LOGGER.exception("the warnings of %s", type(metric).__name__)
        return []


def lower_lr(config: RunConfig) -> str:
    """Return what to do when the loss grows."""
    ways = f"Lower optim.lr (now {config.optim.lr:g})"
    return f"{ways}, or set optim.warmup_epochs." if config.optim.warmup_epochs == 0 else f"{ways}."


def learn_more(config: RunConfig) -> str:
    """Return what to do when the model has not learned."""
    length = (
        f"epochs is {config.epochs:,}"
        if config.max_steps is None
        else f"max_steps is {config.max_steps:,}"
    )
    return f"Train longer ({length}), or try other values of optim.lr (now {config.optim.lr:g})."


RECORDS_PER_EPOCH = 50
PICTURES_EVERY_S = 60.0  # and after the last evaluation
NUM_SAMPLES = 15  # training samples that are drawn
MIN_EVALUATIONS = (
    3  # before a warning of the metric within a run: at the start, all results are poor
)


class Reports:
    """Console, log, `metrics.jsonl`, TensorBoard and pictures of a run."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self._folder = folder
        self._every = job.config.report.every_steps or max(
            1, job.order.steps_per_epoch // RECORDS_PER_EPOCH
        )
        self._steps_per_epoch = job.order.steps_per_epoch
        self._rate = Rate()
        self._step_started = self._drawn_at = time.perf_counter()
        self._console = Console(sys.stdout) if job.world.is_main else None
        has_tensorboard = job.config.report.tensorboard and is_installed("tensorboard")
        self._records = (
            MetricsLog(folder.path, tensorboard=has_tensorboard) if job.world.is_main else None
        )
        self._recorder = StepRecorder(job, folder.path)
        #: The experiment trackers; `close` reports their `outcome` to them.
        self.trackers = Trackers(
            job.config.report.trackers if job.world.is_main else (), folder.path, self.notify
        )
        self._device: DeviceUse | None = None
        self._data_wait = DataWait()
        self._stragglers = Stragglers()
        #: Returns each rank's own work so far, on rank 0; see `HangDetector.work`.
        self.work_of_ranks: Callable[[], Work] = list
        self._trend = LossTrend(job.num_steps)
        self._num_evaluations = 0
        self._has_warned = False
        self._waited_s = 0.0
        self._last_wait: float | None = (
            None  # share of the time since the record before the last one
        )
        # since the last validation
        self._loss_sum = 0.0
        self._num_samples = 0
        self._background = Background()
        steps = job.config.report.profile if job.world.is_main else None
        self._profile = StepProfile(steps, folder.path / "profile")
        #: The settings that differ from the preset, by dotted name, for TensorBoard's table of hyperparameters.
        self.settings: Mapping[str, Any] = {}
        self.first_step_at: float | None = (
            None  #: Unix time at which this process completed its first step, seconds.
        )
        self._has_started = False
        self._evaluated_step = 0

    def notify(self, text: object) -> None:
        """Report an event on the console and in the log."""
        LOGGER.warning("%s", text)
        if self._console is not None:
            self._console.say(str(text))

    def block(self, title: str, rows: dict[str, str], whole: Collection[str] = ()) -> None:
        """Write a title and a line per row; see `Console.block`."""
        if self._console is not None:
            self._console.block(title, rows, whole)

    def start(self, job: Job) -> None:
        """Start or resume training at the job's step: records of later steps, which will be repeated, are removed."""
        # Only the world has changed: a long run's records are not read again, since all processes wait.
        is_same_run = self._has_started and job.world.membership is not None
        self._has_started = True
        if self._records is not None and (
            not is_same_run or self._evaluated_step > job.progress.evaluated_step
        ):
            self._records.truncate_after(job.progress.step, last_eval=job.progress.evaluated_step)
        # For the events in `samebits report`.
        world = job.world
        done = job.progress.step
        last = job.last_result
        LOGGER.info(
            "training from step %d of %d, rank %d of %d",
            done,
            job.num_steps,
            world.rank,
            world.size,
        )
        if not is_same_run:
            # they read the records, without those that are repeated
            self.trackers.start(is_new=not job.progress.step)
            altered = (
                "" if self._records is None else altered_evaluations(self._folder, job.progress)
            )
            for text in filter(None, (self._recorder.start(job), altered)):
                self.notify(text)
            is_resumed = job.progress.step and self._records is not None
            first = (
                next(iter(read_records(self._folder.path, "train")), {}).get("loss")
                if is_resumed
                else None
            )
            self._trend.start(job.progress.step, first if isinstance(first, float) else None)
        self._waited_s = job.loader.waited_s if job.loader is not None else 0.0
        if (
            self._records is not None
            and job.loader is not None
            and job.parts.draw_samples
            and not job.progress.step
        ):
            job.loader.num_to_keep = min(NUM_SAMPLES, len(job.train_data))
        if self._records is not None and self._device is None:
            self._device = DeviceUse(job.world.device)
        self._data_wait.start(job.progress.seconds, job.progress.data_s)
        if (
            self._records is not None
            and not is_same_run
            and last is not None
            and last[0] + 1 == done
        ):
            # This process has become rank 0. The former one may be lost before it had recorded the last step.
            recorded = max(
                (record["step"] for record in read_records(self._folder.path, "train")), default=0
            )
            if recorded < done and done % self._every == 0:
                self._record_step(job, last[1])
        if job.world.membership is None or job.last_result is None:
            self._loss_sum = 0.0
            self._num_samples = 0
        self.resume(job)

    def resume(self, job: Job) -> None:
        """Continue training after a validation or a checkpoint, whose time is not training time."""
        self._rate.resume()
        self._profile.at(job.progress.step)
        self._step_started = time.perf_counter()

    def step(self, job: Job, step: Step, result: StepResult) -> None:
        """Report and record a completed step."""
        self._recorder.step(job, step, result)
        now = time.perf_counter()
        job.progress.seconds += now - self._step_started
        self._step_started = now
        if job.loader is not None:
            job.progress.data_s += job.loader.waited_s - self._waited_s
            self._waited_s = job.loader.waited_s
        self._rate.add(step.num_samples)
        if result.is_finite:
            self._loss_sum += result.loss * step.num_samples
            self._num_samples += step.num_samples
        if self.first_step_at is None:
            self.first_step_at = time.time()
        if self._console is None or self._records is None:
            return
        done = job.progress.step
        total = job.num_steps
        if text := self._trend.add(result.loss):
            self.notify(f"{text}\n  fix  {lower_lr(job.config)}")
        if written := self._profile.at(done):
            self.notify(f"profile of steps {job.config.report.profile} written to {written}")
        if (
            job.loader is not None
            and job.loader.kept
            and (not job.loader.num_to_keep or done == total)
        ):
            self._draw_samples(job)
        left = self._samples_until(job, total) - self._samples_until(job, done)
        if done % self._every == 0:
            self._record_step(job, result)
        self._console.progress(
            epoch=step.epoch + 1,
            steps_per_epoch=job.order.steps_per_epoch,
            num_epochs=-(-total // job.order.steps_per_epoch),
            step=done,
            num_steps=total,
            loss=result.loss,
            samples_per_s=self._rate.samples_per_s,
            left_s=self._rate.seconds_for(left),
            data_wait=self._last_wait,
        )

    def evaluation(self, job: Job, metrics: dict[str, float], metric: Any) -> None:
        """Report a completed validation: its metrics by name, and the recipe's metric, merged on rank 0."""
        epoch = job.progress.step / job.order.steps_per_epoch
        LOGGER.info("evaluation after epoch %g: %s", epoch, metrics)
        if self._console is not None and self._records is not None:
            self._evaluated_step = job.progress.step
            self._records.write("eval", job.progress.step, epoch, metrics)
            config = job.config
            # What runs are compared by, whether or not a user has set it.
            main = {
                "epochs": config.epochs, "global_batch": config.global_batch, "seed": config.seed,
                "optim.name": config.optim.name, "optim.lr": config.optim.lr,
            }  # fmt: skip
            self._records.describe({**main, **self.settings}, metrics)
            best = job.progress.best
            train_loss = self._loss_sum / self._num_samples if self._num_samples else None
            is_best = best is not None and best["step"] == job.progress.step
            others = {name: metrics_of(name, metrics) for name in job.eval_sets}
            names = {name for each in others for name in with_set(each, others[each])}
            own = {name: value for name, value in metrics.items() if name not in names}
            self._console.evaluation(epoch, own, train_loss, is_best=is_best)
            for name, values in others.items():
                self._console.say(describe_set(name, values, len(job.eval_sets[name])))
            if job.progress.has_stopped_early:
                stale = job.progress.num_stale
                name, sign = metric_of(config.stop_early, job.parts.monitor)
                in_all = f"in {counted(stale, 'validation')}"
                order = "larger" if sign > 0 else "smaller"
                self.notify(
                    f"training ends: {name} did not improve {in_all}, {order} is better (stop_early)"
                )
            is_last = job.is_complete
            self._num_evaluations += 1
            is_late = (
                2 * job.progress.step >= job.num_steps and self._num_evaluations >= MIN_EVALUATIONS
            )
            if is_last or (is_late and not self._has_warned):
                texts = warnings_of(metric)
                self._has_warned |= bool(texts)
                if texts:
                    self.notify("\n".join([*texts, f"  fix  {learn_more(job.config)}"]))
            if is_last or time.perf_counter() - self._drawn_at > PICTURES_EVERY_S:
                self._draw(job, metric, self._records)
        self._loss_sum = 0.0
        self._num_samples = 0

    def take_over(self, before: "Reports") -> None:
        """Continue the reports of a process that becomes rank 0."""
        self.first_step_at = before.first_step_at
        self._rate = before._rate
        self._loss_sum = before._loss_sum
        self._num_samples = before._num_samples

    def checkpoint(self, step: int, path: Path) -> None:
        """Record a checkpoint that is whole on disk. Called in the background."""
        if self._records is not None:
            place = path.relative_to(self._folder.path).as_posix()
            self._records.note_checkpoint(step, step / self._steps_per_epoch, place)

    def close(self) -> None:
        """Flush and close the records, and remove the progress line."""
        self._background.join()
        self._profile.close()
        self._recorder.close()
        self.trackers.close()
        if self._console is not None:
            self._console.close()
        if self._records is not None:
            self._records.close()

    def _record_step(self, job: Job, result: StepResult) -> None:
        assert self._records is not None
        done = job.progress.step
        epoch = job.progress.step / job.order.steps_per_epoch
        terms = result.terms if len(result.terms) > 1 else {}
        values: dict[str, float | None] = {
            "loss": result.loss,
            **terms,
            "lr": result.lr,
            "grad_norm": result.norm,
        }
        if job.config.precision == "fp16":
            values |= {
                "loss_scale": job.progress.loss_scale,
                "overflow_steps": job.progress.num_overflows,
            }
        values |= {"samples_per_s": self._rate.samples_per_s, "seconds": job.progress.seconds}
        self._last_wait = self._data_wait.share(job.progress.seconds, job.progress.data_s)
        values["data_wait"] = self._last_wait
        if self._device is not None:
            values |= self._device.values()
        self._records.write("train", done, epoch, values)
        work = self.work_of_ranks()
        if values_of_ranks := self._stragglers.step_ms(work):
            self._records.write("ranks", done, epoch, values_of_ranks)
        ways = advice(
            num_workers=job.loader.num_workers if job.loader is not None else 0,
            num_free_cores=num_cores() // job.world.num_ranks_here - 1,
        )
        data = self._data_wait.notice(job.progress.seconds, job.progress.data_s, ways)
        for text in filter(None, (self._stragglers.notice(work, time.monotonic()), data)):
            self.notify(text)

    def _draw_samples(self, job: Job) -> None:
        """Draw the first training samples in the background: nothing is read again, and no step waits."""
        draw = job.parts.draw_samples
        path = self._folder.pictures / "train_samples.png"
        assert draw is not None
        assert job.loader is not None
        batches = job.loader.kept
        job.loader.num_to_keep = 0
        job.loader.kept = []

        def work() -> None:
            try:
                draw(batches, path)
            except Exception:
                LOGGER.exception("the training samples could not be drawn")

        self._background.start(work)

    def _draw(self, job: Job, metric: Any, records: MetricsLog) -> None:
        pictures = self._folder.pictures
        try:
            self._background.join()
            # Late: only rank 0 needs jinja2, and only now.
            from samebits.report.chart import draw_curves

            best = job.progress.best
            value = None if best is None else best["value"]
            draw_curves(read_records(self._folder.path), pictures, job.parts.monitor[0], value)
            if job.parts.draw is not None:
                job.parts.draw(metric, job.eval_data, pictures)
            records.show(pictures, job.progress.step)
        except Exception as error:
            # Training continues without pictures.
            LOGGER.exception("pictures")
            self.notify(f"pictures could not be drawn: {type(error).__name__}: {error}")
        self._drawn_at = time.perf_counter()

    def _samples_until(self, job: Job, step: int) -> int:
        epochs, steps = divmod(step, job.order.steps_per_epoch)
        return epochs * len(job.train_data) + steps * job.order.global_batch
