"""Preparation of a run before its first step: build or restore the job, and write the settings into the run folder."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.config.document import to_yaml
from samebits.engine.assemble import init_weights, make_job
from samebits.engine.checkpoints.saving import CheckpointManager
from samebits.engine.dataset_info import FILE_NAME, Recipe, build_from, dataset_info_for
from samebits.engine.job import Job
from samebits.engine.output.summary import head
from samebits.engine.run_spec import RunSpec
from samebits.engine.validation import try_metric
from samebits.errors import SamebitsError
from samebits.provenance import step_log
from samebits.provenance.environment import environment
from samebits.provenance.resumed import check_unchanged
from samebits.provenance.run_identity import identity
from samebits.provenance.same_run import check_came_from, check_same_run, plain_settings
from samebits.report.starting import notice_if_slow
from samebits.storage.checkpoint import steps
from samebits.storage.recipe_copy import keep_recipe
from samebits.storage.run_folder import RunFolder, write_atomically


def prepare(
    spec: RunSpec, recipe: Recipe, world: World, folder: RunFolder, origin: Path | None
) -> tuple[Job, CheckpointManager, list[object], tuple[str, dict[str, str]]]:
    """Assemble the job, restore or initialize it, and write the settings; return it, its manager, notes and header."""
    config = spec.config
    # Only rank 0 needs the run folder's disk. An error ends the other ranks at their next collective.
    if world.is_main:
        check_same_run(folder, config, "auto" if spec.is_restart else spec.resume)
        if origin is not None and origin != folder.path:
            check_came_from(RunFolder(origin), config)
    with notice_if_slow("opening the data and building the model" if world.is_main else ""):
        dataset_info = dataset_info_for(recipe, config, world, origin)
        info_folder = origin or folder.path
        job = make_job(
            config, lambda: build_from(recipe, config, dataset_info, info_folder), world, is_restart=spec.is_restart
        )
        job.identity = identity(config, dataset_info)
        manager = CheckpointManager(folder, config.checkpoint, world)
        notes: list[object] = []
        # After a restart the run continues from its own checkpoints, even if it first resumed from another run's.
        restored = spec.is_restart and manager.restore(job, "auto", notes.append)
        if not restored and spec.resume != "never":
            restored = manager.restore(job, spec.resume, notes.append)
        started = {} if restored else init_weights(job, lambda: recipe.build(config, dataset_info))
        # Compared after the restore, since the fingerprint of the former run is in the checkpoint.
        if job.resumed_from is not None:
            before = job.resumed_from
            job.warnings += collectives.run_on_rank0(world, lambda: check_unchanged(before, job.fingerprint, config))
        if not spec.is_restart:
            try_metric(job)
    job.note_world()
    # Written by rank 0 after the restore, so that a refused resume changes no file.
    if world.is_main:
        # A run that failed before its first checkpoint may start again with other settings.
        if not restored or not folder.config.exists():
            write_atomically(folder.path / "config.diff.yaml", to_yaml(spec.diff).encode())
            write_atomically(folder.config, to_yaml(plain_settings(config)).encode())
            if dataset_info:
                folder.write_json(FILE_NAME, dataset_info)
            else:  # a former start may have left one, which another recipe must not read
                (folder.path / FILE_NAME).unlink(missing_ok=True)
            keep_recipe(folder, config.recipe)
        # In another folder, the record of the steps before has to be copied for the chain to continue.
        if restored and origin is not None and origin != folder.path and config.record.steps and job.progress.chain:
            link = bytes.fromhex(job.progress.chain)
            step_log.copy_steps(origin / step_log.FILE_NAME, folder.path / step_log.FILE_NAME, job.progress.step, link)
        folder.write_json("environment.json", {"name": spec.name, **environment(world), "worlds": job.progress.worlds})
    return job, manager, [*notes, *job.warnings], head(spec, job, started)


def prepare_replacement(
    spec: RunSpec, recipe: Recipe, world: World, folder: RunFolder
) -> tuple[Job, CheckpointManager]:
    """Assemble the job of a process that replaces a lost one, whose state comes from another rank."""
    config = spec.config
    dataset_info = dataset_info_for(recipe, config, world, folder.path)
    job = make_job(config, lambda: build_from(recipe, config, dataset_info, folder.path), world, is_restart=True)
    job.identity = identity(config, dataset_info)
    return job, CheckpointManager(folder, config.checkpoint, world)


def find_origin(spec: RunSpec, folder: RunFolder) -> Path | None:
    """Return the run folder that this run resumes from, if it does."""
    if spec.resume not in ("never", "auto"):
        return Path(spec.resume).absolute().parent.parent
    is_resumed = spec.is_restart or spec.resume == "auto"
    return folder.path if is_resumed and steps(folder.checkpoints) else None


def keep_name(spec: RunSpec, origin: Path) -> RunSpec:
    """Return the specification with the name of the resumed run, since its source may be the run folder."""
    # The name is for display, so a damaged file must not prevent a resume.
    with suppress(SamebitsError):
        name = RunFolder(origin).read_json("environment.json").get("name")
        return replace(spec, name=name) if isinstance(name, str) and name else spec
    return spec
