//! Options that users type in requests for a share: those of other tools, and the options of gpushctl that they mean.

/// Options of other tools that have no meaning for a request, without a value.
pub(super) const IGNORED: [&str; 9] = ["-it", "-ti", "-t", "--rm", "-d", "--detach", "--tty", "--pty", "--interactive"];

/// Options of other tools for a command in the background. A lease that outlives its command is requested instead.
pub(super) const DETACHED: [&str; 2] = ["-d", "--detach"];

/// Options of other tools that have no meaning for a request, with a value.
pub(super) const IGNORED_WITH_VALUE: [&str; 9] =
    ["--partition", "--cpus", "--cpus-per-task", "--nodes", "--ntasks", "--job-name", "--account", "--name", "--image"];

/// Options of Slurm that have no meaning for a request, with a value. Its amounts of memory are those of the host.
pub(super) const IGNORED_OF_SLURM: [&str; 8] =
    ["-p", "-c", "-N", "-J", "-n", "--mem", "--mem-per-gpu", "--mem-per-cpu"];

/// Options of other tools whose value is a part of a GPU.
pub(super) const FRACTIONS: [&str; 4] = ["--fraction", "--gpu-fraction", "--part", "--share"];

/// Options of other tools, and the option of gpushctl that takes the same value.
pub(super) const RENAMED: [(&str, &str); 16] = [
    ("-m", "--memory"),
    ("--mem", "--memory"),
    ("--mem-per-gpu", "--memory"),
    ("--gpu-memory", "--memory"),
    ("--vram", "--memory"),
    ("--profile", "--mig"),
    ("--slice", "--mig"),
    ("--shared", "--mps"),
    ("--share", "--mps"),
    ("--percent", "--mps"),
    ("--percentage", "--mps"),
    ("--exclusive", "--whole"),
    ("-n", "--count"),
    ("--number", "--count"),
    ("--device", "--gpu"),
    ("--id", "--gpu"),
];

/// Options of other tools whose value is a number of GPUs.
pub(super) const NUMBER_OF_GPUS: [&str; 8] =
    ["--gpus", "-G", "--ngpus", "--num-gpus", "--gpus-per-task", "--gpus-per-node", "--gres", "--nproc-gpus"];

/// Options of other tools whose value is a duration.
pub(super) const DURATIONS: [&str; 6] = ["-t", "--time", "--until", "--duration", "--timeout", "--for"];

/// Options that name the kind of share.
pub(super) const SHARES: [&str; 4] = ["--mig", "--mps", "--whole", "--timeslice"];

/// Long options that users type with one dash.
pub(super) const LONG: [&str; 6] = ["--mig", "--mps", "--whole", "--timeslice", "--memory", "--slices"];

/// Options whose value is an amount of memory.
pub(super) const MEMORY: [&str; 6] = ["--memory", "--mem", "--mem-per-gpu", "--gpu-memory", "--vram", "-m"];

/// Options that may come with the kind of share.
pub(super) const WITH_SHARE: [&str; 6] = ["--for", "--memory", "--count", "--wait", "--gpu", "-g"];

/// Largest number that may be the index of a GPU. A larger number before a command is a percentage.
pub(super) const LARGEST_INDEX: u32 = 15;
