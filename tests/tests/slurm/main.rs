//! Slurm: the hooks with the environment that Slurm sets.

mod hooks;
