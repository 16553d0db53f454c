//! Tests on a real Slurm with simulated GPUs. `gpush_tests::slurm` describes the cluster.

mod channels;
mod failures;
mod fuzz;
mod life;
mod load;
mod mapping;
mod rig;
mod spank;

/// Four GPUs without MIG.
const HOST: &str = "[[gpu]]\nmodel = \"l4\"\ncount = 4\n";

/// All GPUs are used whole, and only by jobs.
const WHOLE: &str = "[[gpu]]\nmatch = [\"0-3\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";

/// All GPUs are shared through MPS, and only by jobs.
const MPS: &str = "[mps]\nhealth_s = 1\n[[gpu]]\nmatch = [\"0-3\"]\nmode = \"mps\"\nowner = \"slurm\"\n";

/// Each GPU is shared by two jobs in turn.
const TIMESLICE: &str =
    "[[gpu]]\nmatch = [\"0-3\"]\nmode = \"timeslice\"\nowner = \"slurm\"\ntimeslice = { replicas = 2 }\n";
