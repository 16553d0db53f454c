//! Tests on a real Slurm with simulated GPUs.

mod rig;
