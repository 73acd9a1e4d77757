"""Line budgets: how long each part of the repository may be. `test_budgets.py` compares them with the files.

Every other rule limits one part: a function, a file, the number of files in a folder. These numbers limit the sum.

To raise a number, write the reason behind it, in the same line: `"data": 4_700,  # reads Zarr stores`. After a cut,
lower it: the test fails when a number is far above the size, and prints the line to write.
"""

ROOT = "."  # the modules of the package that are in no folder

# Lines of the Python files of each folder of src/samebits, by wing. One folder a line, so that changes merge.
FOLDERS = {
    # What a contributor must know. Target: 30,000.
    "kernel": {
        ROOT: 1_410,  # the bytes of tensors, from provenance; locks and own folders of caches, from data
        "cluster": 3_700,  # a recovery that does not return is named; waits for half a message end
        "config": 1_780,
        "data": 4_640,  # lost data in JPEG files, 12-bit values, files left out, encodings of lists
        "engine": 3_840,  # comments at traps; altered evaluations are named
        "launch": 4_370,  # names nodes that are waited for, lost or refused
        "metrics": 840,
        "module": 750,  # gradients that torch refuses on a GPU
        "optim": 380,
        "own_loop": 4_950,  # samebits launch: decisions by the own numbers of a loop, averages of one of two models
        "parallel": 3_860,  # machines with several ranks exchange in two levels, during backward
        "portable": 3_440,  # operations of detection, CTC, volumes and common layers; initializers; lists for check
        "provenance": 1_570,  # the one reader of a run folder, from engine, verify and diff
        "report": 2_470,  # comments at traps
        "storage": 2_100,  # names nodes that are waited for, lost or refused
        "watchdog": 410,
    },
    # Commands that look at a run or its parts. Target: 9,000.
    "tools": {
        "bench": 200,
        "check": 2_320,  # proves the acting state by restoring the others
        "diff": 1_610,
        "doctor": 690,
        "finders": 120,
        "inference": 1_390,  # signatures of published models (ADR 66)
        "run_views": 2_600,  # means and deviations over seeds, charts as SVG files
        "scaling": 590,
        "simulate": 420,  # counts what each machine sends
        "sweeps": 950,  # comments at traps
        "verify": 1_120,  # compares best.json; comments at traps
    },
    # What users name or call. Target: 13,000.
    "edges": {
        "cli": 2_850,  # samebits launch
        "integrations": 2_230,
        "recipes": 8_690,  # masks, labels and names of classes are checked before training
    },
}

# Lines of a whole: the wings, the package (target: 60,000, then 52,000), the tests (46,000) and the benchmarks (8,000).
SUMS = {
    "kernel": 40_400,  # samebits launch (own_loop); portable arithmetic of all common layers
    "tools": 12_020,  # comments at traps; verify compares more files, check proves causes
    "edges": 14_040,  # the same, labels and classes, and the preprocessing of each recipe in exports
    "package": 66_700,  # gradients on a GPU; portable arithmetic of all common layers
    "tests": 56_800,  # forged publications; public scripts in kind, timm and peft; functions up to the optimizer
    "benchmarks": 8_600,  # samebits launch, what leaves a machine, beside DDP, by layout of machines, with bars
}
